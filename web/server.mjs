// A static server for web/dist on localhost: node web/server.mjs [PORT]
import { createReadStream } from "node:fs";
import { stat } from "node:fs/promises";
import { createServer } from "node:http";
import { extname, join, normalize, sep } from "node:path";
import { fileURLToPath } from "node:url";

const TYPES = {
  ".html": "text/html; charset=utf-8",
  ".js": "text/javascript; charset=utf-8",
  ".css": "text/css; charset=utf-8",
  ".svg": "image/svg+xml",
  ".wasm": "application/wasm",
};

const DIST = fileURLToPath(new URL("./dist", import.meta.url));

/** Serves a folder under a prefix of the path. Resolves to the server once it listens. */
export function serve(port = 0, { root = DIST, prefix = "/" } = {}) {
  const server = createServer(async (request, response) => {
    const path = decodeURIComponent(new URL(request.url, "http://localhost").pathname);
    const inside = path.startsWith(prefix) ? path.slice(prefix.length) : "..";
    const file = normalize(join(root, inside.endsWith("/") || inside === "" ? `${inside}index.html` : inside));
    const found = file.startsWith(root + sep) ? await stat(file).catch(() => null) : null;
    if (!found?.isFile()) {
      response.writeHead(404).end("not found\n");
      return;
    }
    response.writeHead(200, {
      "content-type": TYPES[extname(file)] ?? "application/octet-stream",
      "content-length": found.size,
      "cache-control": "no-cache",
    });
    createReadStream(file).pipe(response);
  });
  return new Promise((resolve, reject) => {
    server.once("error", reject);
    server.listen(port, "127.0.0.1", () => resolve(server));
  });
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const server = await serve(Number(process.argv[2] ?? 8080));
  console.log(`http://localhost:${server.address().port}/`);
}
