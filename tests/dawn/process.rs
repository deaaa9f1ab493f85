//! Dawn in a process of its own: `tests/tint/serve.mjs`, which says what is sent.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{LazyLock, Mutex, PoisonError};

use serde_json::{Value, json};

/// What the adapter says of itself.
#[derive(Debug)]
pub(crate) struct Adapter {
    pub(crate) name: String,
    pub(crate) features: Vec<String>,
    /// The smallest subgroup and the largest.
    pub(crate) sizes: (u32, u32),
}

/// One process, whose devices every test shares: kernels take long to compile.
#[derive(Debug)]
pub(crate) struct Dawn {
    pub(crate) adapter: Adapter,
    pipes: Mutex<Pipes>,
}

#[derive(Debug)]
struct Pipes {
    /// Ends when its input does, with this program.
    _child: Child,
    input: ChildStdin,
    output: ChildStdout,
}

/// Dawn, or why it is not there.
pub(crate) static DAWN: LazyLock<Result<Dawn, String>> = LazyLock::new(start);

fn start() -> Result<Dawn, String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tint");
    if !folder.join("node_modules/webgpu").exists() {
        return Err("Dawn for Node is missing: npm --prefix tests/tint ci".to_owned());
    }
    let mut command = Command::new("node");
    command.arg(folder.join("serve.mjs")).stdin(Stdio::piped()).stdout(Stdio::piped());
    if let Some(driver) = std::env::var_os("KVFOLD_DAWN_DRIVER") {
        command.env("VK_DRIVER_FILES", driver);
    }
    let mut child = command.spawn().map_err(|error| format!("node: {error}"))?;
    let (input, output) = child.stdin.take().zip(child.stdout.take()).ok_or("no pipes")?;
    let mut pipes = Pipes { _child: child, input, output };
    let (said, _) = pipes.answer()?;
    let adapter = Adapter {
        name: said["description"].as_str().unwrap_or_default().to_owned(),
        features: serde_json::from_value(said["features"].clone()).map_err(|error| error.to_string())?,
        sizes: serde_json::from_value(said["sizes"].clone()).map_err(|error| error.to_string())?,
    };
    Ok(Dawn { adapter, pipes: Mutex::new(pipes) })
}

impl Pipes {
    fn ask(&mut self, header: &Value, bytes: &[u8]) -> Result<(Value, Vec<u8>), String> {
        let header = header.to_string();
        let mut message = [header.len() as u32, bytes.len() as u32].map(u32::to_le_bytes).concat();
        message.extend_from_slice(header.as_bytes());
        message.extend_from_slice(bytes);
        self.input.write_all(&message).map_err(|error| format!("Dawn's process: {error}"))?;
        self.answer()
    }

    fn answer(&mut self) -> Result<(Value, Vec<u8>), String> {
        let lengths = self.read(8)?;
        let (header, bytes) = lengths.split_at(4);
        let length =
            |bytes: &[u8]| bytes.iter().rev().fold(0, |length, &byte| length << 8 | usize::from(byte));
        let (header, bytes) = (self.read(length(header))?, self.read(length(bytes))?);
        let header: Value = serde_json::from_slice(&header).map_err(|error| error.to_string())?;
        match header["error"].as_str() {
            Some(error) => Err(error.to_owned()),
            None => Ok((header, bytes)),
        }
    }

    fn read(&mut self, size: usize) -> Result<Vec<u8>, String> {
        let mut bytes = vec![0; size];
        self.output.read_exact(&mut bytes).map_err(|error| format!("Dawn's process ended: {error}"))?;
        Ok(bytes)
    }
}

/// A binding's number and its WebGPU type.
pub(crate) type Slot = (u32, &'static str);

impl Dawn {
    fn ask(&self, header: &Value, bytes: &[u8]) -> Result<(Value, Vec<u8>), String> {
        self.pipes.lock().unwrap_or_else(PoisonError::into_inner).ask(header, bytes)
    }

    /// Compiles a kernel and says its number.
    pub(crate) fn compile(
        &self,
        subgroups: bool,
        text: &str,
        entry: &str,
        slots: &[Slot],
    ) -> Result<u64, String> {
        let slots: Vec<Value> =
            slots.iter().map(|(number, ty)| json!({ "number": number, "type": ty })).collect();
        let make = json!({ "subgroups": subgroups, "text": text, "entry": entry, "bindings": slots });
        let (said, _) = self.ask(&make, &[])?;
        said["kernel"].as_u64().ok_or_else(|| "a kernel without a number".to_owned())
    }

    /// Runs a kernel on the bytes of its bindings, and returns those that it may write one after the other.
    pub(crate) fn run(&self, kernel: u64, groups: [u32; 3], bindings: &[&[u8]]) -> Result<Vec<u8>, String> {
        let sizes: Vec<usize> = bindings.iter().map(|bytes| bytes.len()).collect();
        let run = json!({ "kernel": kernel, "groups": groups, "sizes": sizes });
        Ok(self.ask(&run, &bindings.concat())?.1)
    }
}
