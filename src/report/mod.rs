//! What MiniCache and QJL would save and cost on a capture: the figures behind `kvfold report` and the page.
//!
//! ```
//! use kvfold::report::{Engine, ReportOptions, report_blocking};
//! # use kvfold::capture::{Capture, CaptureInfo, Layer};
//! # use kvfold::{DType, Shape, Tensor};
//! # fn main() -> kvfold::Result<()> {
//! # let ones = Tensor::from_f32(&[1.0; 40], DType::F16, Shape::new(1, 1, 10, 4)?)?;
//! # let layer = Layer::new(ones.clone(), ones);
//! # let capture = Capture::new(vec![layer.clone(), layer], CaptureInfo::default())?;
//! let report = report_blocking(&capture, &ReportOptions::default(), &Engine::Cpu, &mut |_| true)?;
//! println!("{} layers, ratio {:?}", report.shape.layers, report.totals.bytes.ratio);
//! # Ok(())
//! # }
//! ```
//!
//! The [`Engine`] says who computes: the CPU twins, or the kernels on a device. What they find becomes figures by the same
//! code, [`metrics`](crate::metrics); exact attention and the baselines run on the host in both. Keys and values count up
//! to each sequence's length, padding nowhere.

mod cpu;
#[cfg(feature = "gpu")]
mod gpu;
mod layer;
mod measurement;
mod options;
mod pair;
mod planes;
mod queries;
mod rows;
mod span;
mod totals;
mod types;
mod work;

pub use measurement::{Measurement, Method};
pub use options::{OptionsEcho, ReportOptions};
pub(crate) use planes::replaced;
pub use planes::{
    AttentionErrors, HeadAttention, LayerMethods, MethodFigures, ModelShape, PlanesFigures, PlanesRequest,
    TableSource, estimate,
};
pub use rows::{PairRows, RowFigures};
#[doc(hidden)] // for the command line alone
pub use totals::counted;
pub use types::{
    Baselines, Bytes, CaptureShape, Causes, FoldFigures, KeyFigures, LayerFigures, LayerShape,
    MiniCacheTotals, Pair, PairFigures, QjlFigures, QjlTotals, Report, SkippedPair, Totals,
};

use crate::capture::Capture;
use crate::error::{Error, Result};
#[cfg(feature = "gpu")]
use crate::gpu::Gpu;

/// Who computes.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Engine {
    /// The CPU twins.
    Cpu,
    /// The kernels on this device.
    #[cfg(feature = "gpu")]
    Gpu(Gpu),
}

/// How far a report is: pairs and layers, each a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// Steps done.
    pub done: usize,
    /// Steps there are.
    pub of: usize,
}

impl Progress {
    /// So many steps of so many.
    #[cfg(feature = "align")]
    pub(crate) const fn new(done: usize, of: usize) -> Self {
        Self { done, of }
    }
}

/// Measures a capture. `progress` is told of every step, first with none done; when it returns false the work ends.
///
/// # Errors
/// [`Error::Cancelled`] when `progress` says so; what [`Capture::check`] says of the capture; [`Error::MissingTensor`]
/// when it holds keys before RoPE alone; [`Error::Range`] for bad options, or a projection that the keys' dimension
/// does not allow; [`Error::Shape`] for a head dimension above 512; and, on a device, [`Error::Limit`],
/// [`Error::OutOfMemory`], [`Error::Device`] and [`Error::DeviceLost`].
pub async fn report(
    capture: &Capture,
    options: &ReportOptions,
    engine: &Engine,
    progress: &mut dyn FnMut(Progress) -> bool,
) -> Result<Report> {
    let mut measurement = Measurement::new(capture, options, engine)?;
    let count = capture.layers.len();
    let mut steps = Steps { done: 0, of: 2 * count - 1, progress };
    steps.tell()?;
    let (mut pairs, mut layers) = (Vec::with_capacity(count - 1), Vec::with_capacity(count));
    for index in 0..count {
        if index > 0 {
            pairs.push(measurement.pair(index).await?);
            steps.step()?;
        }
        layers.push(measurement.layer(index).await?);
        steps.step()?;
    }
    Ok(measurement.finish(pairs, layers))
}

/// [`report`], waiting for it; on a device that nobody else polls.
///
/// # Errors
/// As [`report`].
#[cfg(not(target_arch = "wasm32"))]
pub fn report_blocking(
    capture: &Capture,
    options: &ReportOptions,
    engine: &Engine,
    progress: &mut dyn FnMut(Progress) -> bool,
) -> Result<Report> {
    wait(engine, report(capture, options, engine, progress))
}

/// [`report`], by the CPU twins where the device turns out too small or is lost; [`Report::fallback`] then says why. The
/// progress begins again with none done.
///
/// # Errors
/// As [`report`], without [`Error::Limit`], [`Error::OutOfMemory`] and [`Error::DeviceLost`].
pub async fn report_or_cpu(
    capture: &Capture,
    options: &ReportOptions,
    engine: &Engine,
    progress: &mut dyn FnMut(Progress) -> bool,
) -> Result<Report> {
    match report(capture, options, engine, progress).await {
        Err(cause @ (Error::Limit { .. } | Error::OutOfMemory { .. } | Error::DeviceLost { .. })) => {
            let mut report = report(capture, options, &Engine::Cpu, progress).await?;
            report.fallback = Some(cause.to_string());
            Ok(report)
        }
        result => result,
    }
}

/// [`report_or_cpu`], waiting for it; on a device that nobody else polls.
///
/// # Errors
/// As [`report_or_cpu`].
#[cfg(not(target_arch = "wasm32"))]
pub fn report_or_cpu_blocking(
    capture: &Capture,
    options: &ReportOptions,
    engine: &Engine,
    progress: &mut dyn FnMut(Progress) -> bool,
) -> Result<Report> {
    wait(engine, report_or_cpu(capture, options, engine, progress))
}

#[cfg(not(target_arch = "wasm32"))]
fn wait<T>(engine: &Engine, future: impl Future<Output = T>) -> T {
    match engine {
        Engine::Cpu => at_once(future),
        #[cfg(feature = "gpu")]
        Engine::Gpu(gpu) => gpu.block_on(future),
    }
}

/// The result of a future that waits for nothing outside: the twins compute while they are polled.
#[cfg(not(target_arch = "wasm32"))]
fn at_once<T>(future: impl Future<Output = T>) -> T {
    let mut future = std::pin::pin!(future);
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    loop {
        if let std::task::Poll::Ready(result) = future.as_mut().poll(&mut context) {
            return result;
        }
    }
}

impl Engine {
    /// Backend, adapter, and whether a program on the CPU computes.
    fn describe(&self) -> (String, Option<String>, bool) {
        match self {
            Self::Cpu => ("cpu".to_owned(), None, true),
            #[cfg(feature = "gpu")]
            Self::Gpu(gpu) => {
                let caps = gpu.caps();
                (caps.backend.clone(), Some(caps.adapter.clone()), caps.software)
            }
        }
    }
}

/// Steps done, and who is told.
struct Steps<'a> {
    done: usize,
    of: usize,
    progress: &'a mut dyn FnMut(Progress) -> bool,
}

impl Steps<'_> {
    fn tell(&mut self) -> Result<()> {
        let (done, of) = (self.done, self.of);
        if (self.progress)(Progress { done, of }) { Ok(()) } else { Err(Error::Cancelled { done, of }) }
    }

    fn step(&mut self) -> Result<()> {
        self.done += 1;
        self.tell()
    }
}
