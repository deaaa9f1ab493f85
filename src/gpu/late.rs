//! Errors that come late. A browser answers an error scope some turns of its event loop after the scope has closed; what
//! was made in it is inert meanwhile, and what it would have computed is zeros. Every read-back therefore waits for the
//! answers to all scopes from before it, and several read-backs may wait for one answer.

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

use super::lock;
use crate::error::{Error, Result};

#[cfg(not(target_arch = "wasm32"))]
pub(super) type Answer = Pin<Box<dyn Future<Output = Option<wgpu::Error>> + Send>>;
#[cfg(target_arch = "wasm32")]
pub(super) type Answer = Pin<Box<dyn Future<Output = Option<wgpu::Error>>>>;

/// Scopes without an answer, and errors that nobody has been told of.
#[derive(Debug, Default)]
pub(super) struct Scopes(Mutex<Vec<Arc<Scope>>>);

/// What one read-back waits for.
#[derive(Debug)]
pub(super) struct Awaited(Vec<Arc<Scope>>);

/// An error scope.
struct Scope {
    what: String,
    bytes: u64,
    state: Mutex<State>,
    wakers: Arc<Wakers>,
}

enum State {
    Asked(Answer),
    Answered(Option<wgpu::Error>),
}

/// A future keeps the waker of its last poll alone: all that wait for a scope share this one.
#[derive(Default)]
struct Wakers(Mutex<Vec<Waker>>);

impl Scopes {
    /// Keeps a scope whose answer has not come.
    pub(super) fn keep(&self, what: &str, bytes: u64, answer: Answer) {
        let state = Mutex::new(State::Asked(answer));
        let scope = Scope { what: what.to_owned(), bytes, state, wakers: Arc::default() };
        lock(&self.0).push(Arc::new(scope));
    }

    /// All that were kept until now.
    pub(super) fn awaited(&self) -> Awaited {
        Awaited(lock(&self.0).clone())
    }

    /// Adds those that were kept since `awaited` was made.
    pub(super) fn join(&self, awaited: &mut Awaited) {
        for scope in lock(&self.0).iter() {
            if !awaited.0.iter().any(|held| Arc::ptr_eq(held, scope)) {
                awaited.0.push(Arc::clone(scope));
            }
        }
    }

    /// The first error among the awaited, once all of them are known. An error is told to everyone who waits for it.
    pub(super) fn poll(&self, awaited: &mut Awaited, context: &mut Context<'_>) -> Poll<Result<()>> {
        let mut first = Ok(());
        let mut told = Vec::new();
        awaited.0.retain(|scope| match scope.poll(context) {
            Poll::Pending => true,
            Poll::Ready(answer) => {
                if let (Ok(()), Err(error)) = (&first, answer) {
                    first = Err(error);
                }
                told.push(Arc::clone(scope));
                false
            }
        });
        lock(&self.0).retain(|scope| !told.iter().any(|told| Arc::ptr_eq(told, scope)));
        if first.is_err() || awaited.0.is_empty() { Poll::Ready(first) } else { Poll::Pending }
    }
}

impl Scope {
    fn poll(&self, context: &mut Context<'_>) -> Poll<Result<()>> {
        let mut state = lock(&self.state);
        if let State::Asked(answer) = &mut *state {
            self.wakers.add(context.waker());
            let all = Waker::from(Arc::clone(&self.wakers));
            let Poll::Ready(error) = answer.as_mut().poll(&mut Context::from_waker(&all)) else {
                return Poll::Pending;
            };
            *state = State::Answered(error);
        }
        match &*state {
            State::Answered(Some(cause)) => Poll::Ready(Err(device_error(&self.what, self.bytes, cause))),
            _ => Poll::Ready(Ok(())),
        }
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scope").field("what", &self.what).finish_non_exhaustive()
    }
}

impl Wakers {
    fn add(&self, waker: &Waker) {
        let mut wakers = lock(&self.0);
        if !wakers.iter().any(|held| held.will_wake(waker)) {
            wakers.push(waker.clone());
        }
    }
}

impl Wake for Wakers {
    fn wake(self: Arc<Self>) {
        let wakers = std::mem::take(&mut *lock(&self.0));
        wakers.into_iter().for_each(Waker::wake);
    }
}

/// An error of wgpu's as the library's own.
pub(super) fn device_error(what: &str, need: u64, cause: &wgpu::Error) -> Error {
    match cause {
        wgpu::Error::OutOfMemory { .. } => Error::OutOfMemory { what: what.to_owned(), need },
        other => Error::Device { what: what.to_owned(), cause: other.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    use super::*;

    /// What JavaScript's promises do: one answer, and the waker of the last poll.
    #[derive(Default)]
    struct Promise {
        answer: Option<Option<wgpu::Error>>,
        waker: Option<Waker>,
    }

    struct Polled(Arc<Mutex<Promise>>);

    impl Future for Polled {
        type Output = Option<wgpu::Error>;

        fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
            let mut promise = lock(&self.0);
            promise.waker = Some(context.waker().clone());
            promise.answer.take().map_or(Poll::Pending, Poll::Ready)
        }
    }

    /// A task, which counts how often it is woken.
    #[derive(Default)]
    struct Task(AtomicU32);

    impl Wake for Task {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Relaxed);
        }
    }

    fn resolve(promise: &Mutex<Promise>, answer: Option<wgpu::Error>) {
        lock(promise).answer = Some(answer);
        let waker = lock(promise).waker.take();
        waker.expect("somebody waits").wake();
    }

    fn refused() -> Option<wgpu::Error> {
        Some(wgpu::Error::OutOfMemory { source: "no more".into() })
    }

    fn kept(scopes: &Scopes, what: &str) -> Arc<Mutex<Promise>> {
        let promise = Arc::new(Mutex::new(Promise::default()));
        scopes.keep(what, 5, Box::pin(Polled(Arc::clone(&promise))));
        promise
    }

    fn is_ok(poll: Poll<Result<()>>) -> bool {
        matches!(poll, Poll::Ready(Ok(())))
    }

    #[test]
    fn everybody_who_waits_is_woken() {
        let scopes = Scopes::default();
        let promise = kept(&scopes, "buffer");
        let tasks = [(); 3].map(|()| Arc::new(Task::default()));
        let mut awaited = [(); 3].map(|()| scopes.awaited());
        for (task, awaited) in tasks.iter().zip(&mut awaited) {
            let waker = Waker::from(Arc::clone(task));
            for _ in 0..2 {
                assert!(scopes.poll(awaited, &mut Context::from_waker(&waker)).is_pending());
            }
        }
        resolve(&promise, None);
        assert_eq!(tasks.each_ref().map(|task| task.0.load(Relaxed)), [1; 3]);
        for mut awaited in awaited {
            assert!(is_ok(scopes.poll(&mut awaited, &mut Context::from_waker(Waker::noop()))));
        }
        assert!(scopes.awaited().0.is_empty());
    }

    #[test]
    fn an_error_is_told_to_all_from_before_it_and_to_none_after() {
        let scopes = Scopes::default();
        let mut context = Context::from_waker(Waker::noop());
        let (good, bad) = (kept(&scopes, "good"), kept(&scopes, "bad"));
        let mut early = [scopes.awaited(), scopes.awaited()];
        for awaited in &mut early {
            assert!(scopes.poll(awaited, &mut context).is_pending());
        }
        resolve(&bad, refused());
        for mut awaited in early {
            let Poll::Ready(Err(error)) = scopes.poll(&mut awaited, &mut context) else { panic!("no error") };
            assert!(matches!(error, Error::OutOfMemory { what, need: 5 } if what == "bad"));
        }
        let mut late = scopes.awaited();
        assert!(scopes.poll(&mut late, &mut context).is_pending(), "the other scope is still open");
        resolve(&good, None);
        assert!(is_ok(scopes.poll(&mut late, &mut context)));
    }

    #[test]
    fn an_error_told_to_another_is_told_to_who_was_there_before() {
        let scopes = Scopes::default();
        let mut context = Context::from_waker(Waker::noop());
        let bad = kept(&scopes, "bad");
        let (mut first, mut second) = (scopes.awaited(), scopes.awaited());
        assert!(scopes.poll(&mut first, &mut context).is_pending());
        resolve(&bad, refused());
        assert!(matches!(scopes.poll(&mut first, &mut context), Poll::Ready(Err(_))));
        let late = kept(&scopes, "late");
        scopes.join(&mut second);
        assert!(matches!(scopes.poll(&mut second, &mut context), Poll::Ready(Err(_))));
        assert!(scopes.poll(&mut second, &mut context).is_pending(), "what came later was joined");
        resolve(&late, None);
        assert!(is_ok(scopes.poll(&mut second, &mut context)));
    }

    #[test]
    fn an_error_that_nobody_heard_is_kept() {
        let scopes = Scopes::default();
        let mut context = Context::from_waker(Waker::noop());
        let bad = kept(&scopes, "bad");
        let mut dropped = scopes.awaited();
        assert!(scopes.poll(&mut dropped, &mut context).is_pending());
        drop(dropped);
        resolve(&bad, refused());
        assert!(matches!(scopes.poll(&mut scopes.awaited(), &mut context), Poll::Ready(Err(_))));
        assert!(is_ok(scopes.poll(&mut scopes.awaited(), &mut context)));
    }
}
