//! How long each operation takes on a device, and its twin on the CPU.

mod gpu;

use serde::Serialize;

use gpu::Device;

use super::rows::{self, Set};
use crate::attention::{self, AttendOptions};
use crate::capture::Capture;
use crate::error::{Error, Result};
use crate::gpu::Gpu;
use crate::minicache::{self, Layer, MergeOptions, Retention};
use crate::qjl::planes::{self, Calibration, Codec, PlanesOptions, Tables};
use crate::qjl::{self, KeyScale, Projection, ProjectionKind};
use crate::rope::Positions;

/// Most calls recorded into one submit, so that the submit's own cost is shared by many.
const BATCH: u32 = 16;
/// Milliseconds of a submit that are enough: where calls are slow, fewer of them share one.
const ENOUGH: f64 = 100.0;
/// Submits, of which the median is told; two more come first, to compile the kernels and to see how slow they are.
const SUBMITS: usize = 5;

/// One operation.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Timing {
    /// The operation.
    pub kernel: &'static str,
    /// Calls in each submit, 1 to 16; 0 where no device was given.
    pub batch: u32,
    /// Milliseconds of a call: the median submit, from recording to the read-back's arrival, over its calls. `None` where
    /// no device was given.
    pub milliseconds: Option<f64>,
    /// Milliseconds of the twin on the CPU, one thread: the median of as many calls as there are submits.
    pub twin_milliseconds: f64,
}

/// Times every operation on two layers of the capture, or on made-up rows where it has no two with queries. `clock` gives
/// milliseconds from any start; `progress` is called as [`selftest`](super::selftest) calls it.
///
/// # Errors
/// [`Error::Cancelled`] when `progress` says so, and what a device refuses.
pub async fn timings(
    gpu: Option<&Gpu>,
    capture: Option<&Capture>,
    clock: &dyn Fn() -> f64,
    progress: &mut dyn FnMut(usize, usize) -> bool,
) -> Result<Vec<Timing>> {
    let sets = rows::sets(capture)?;
    let Some(set) = sets.last() else { return Ok(Vec::new()) };
    let twin = Twin::new(set)?;
    let device = match gpu {
        Some(gpu) => Some(Device::new(gpu, &twin).await?),
        None => None,
    };
    let mut found = Vec::with_capacity(Operation::ALL.len());
    for (done, operation) in Operation::ALL.into_iter().enumerate() {
        if !progress(done, Operation::ALL.len()) {
            return Err(Error::Cancelled { done, of: Operation::ALL.len() });
        }
        let (milliseconds, batch) = match &device {
            Some(device) => {
                let (milliseconds, batch) = device.time(operation, clock).await?;
                (Some(milliseconds), batch)
            }
            None => (None, 0),
        };
        let twin_milliseconds = twin.time(operation, clock)?;
        found.push(Timing { kernel: operation.name(), batch, milliseconds, twin_milliseconds });
    }
    Ok(found)
}

#[derive(Clone, Copy, Debug)]
enum Operation {
    Similarity,
    Merge,
    Restore,
    Exact,
    Quantize,
    QuantizeValues,
    Scores,
    Attend,
    PlaneKeys,
    PlaneValues,
    PlaneScores,
    PlaneAttend,
}

impl Operation {
    const ALL: [Self; 12] = [
        Self::Similarity,
        Self::Merge,
        Self::Restore,
        Self::Exact,
        Self::Quantize,
        Self::QuantizeValues,
        Self::Scores,
        Self::Attend,
        Self::PlaneKeys,
        Self::PlaneValues,
        Self::PlaneScores,
        Self::PlaneAttend,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Similarity => "minicache similarity",
            Self::Merge => "minicache merge",
            Self::Restore => "minicache restore",
            Self::Exact => "exact attention",
            Self::Quantize => "qjl quantize",
            Self::QuantizeValues => "qjl quantize values",
            Self::Scores => "qjl scores",
            Self::Attend => "qjl attend",
            Self::PlaneKeys => "planes encode keys",
            Self::PlaneValues => "planes encode values",
            Self::PlaneScores => "planes scores",
            Self::PlaneAttend => "planes attend",
        }
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_unstable_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or_default()
}

fn causal() -> AttendOptions<'static> {
    AttendOptions::default().causal(true)
}

/// Everything on the host.
struct Twin<'a> {
    set: &'a Set,
    merge: MergeOptions,
    folded: minicache::Folded,
    projection: Projection,
    sketch: qjl::SketchedKeys,
    quantized: qjl::QuantizedValues,
    codec: Codec,
    tables: Tables,
    starts: Vec<u32>,
    key_codes: planes::PlaneCodes,
    value_codes: planes::PlaneCodes,
}

impl<'a> Twin<'a> {
    fn new(set: &'a Set) -> Result<Self> {
        let (keys, values) = (set.lower.view(), set.values.view());
        let dim = keys.shape().dim;
        // A rule under which something merges on any rows.
        let merge = MergeOptions::default().retention(Retention::Fraction(0.5));
        let projection = Projection::new(ProjectionKind::Gaussian, dim, dim, 42)?;
        let options = PlanesOptions::default().centring(planes::Centring::None).recent(0);
        let codec = Codec::new(options, dim, values.shape().dim, None)?;
        let starts = vec![0; keys.shape().batch];
        let tables = Tables::calibrate(&Calibration::new(&keys, Positions::Start(&starts)), &options)?;
        Ok(Self {
            folded: minicache::cpu::merge(&keys, &set.upper.view(), &merge)?,
            sketch: qjl::cpu::quantize(&keys, &projection, KeyScale::Norm)?,
            quantized: qjl::cpu::quantize_values(&values)?,
            key_codes: planes::cpu::encode_keys(&codec, &keys, Positions::Start(&starts), &tables)?,
            value_codes: planes::cpu::encode_values(&codec, &values)?,
            set,
            merge,
            projection,
            codec,
            tables,
            starts,
        })
    }

    fn time(&self, operation: Operation, clock: &dyn Fn() -> f64) -> Result<f64> {
        let mut times = Vec::with_capacity(SUBMITS);
        for _ in 0..SUBMITS {
            let start = clock();
            self.run(operation)?;
            times.push(clock() - start);
        }
        Ok(median(times))
    }

    fn run(&self, operation: Operation) -> Result<()> {
        let (keys, upper) = (self.set.lower.view(), self.set.upper.view());
        let (values, queries) = (self.set.values.view(), self.set.queries.view());
        let (projection, codec, tables) = (&self.projection, &self.codec, &self.tables);
        let stored = planes::Stored {
            keys: &keys,
            key_codes: &self.key_codes,
            values: &values,
            value_codes: &self.value_codes,
            tables,
        };
        match operation {
            Operation::Similarity => drop(minicache::cpu::similarity(&keys, &upper, &self.merge)?),
            Operation::Merge => drop(minicache::cpu::merge(&keys, &upper, &self.merge)?),
            Operation::Restore => drop(minicache::cpu::restore(&self.folded, Layer::Upper)?),
            Operation::Exact => drop(attention::exact(&queries, &keys, &values, None, &causal())?),
            Operation::Quantize => drop(qjl::cpu::quantize(&keys, projection, KeyScale::Norm)?),
            Operation::QuantizeValues => drop(qjl::cpu::quantize_values(&values)?),
            Operation::Scores => {
                drop(qjl::cpu::scores(&queries, &self.sketch, projection, KeyScale::Norm)?);
            }
            Operation::Attend => {
                let (sketch, quantized) = (&self.sketch, &self.quantized);
                let scale = KeyScale::Norm;
                drop(qjl::cpu::attend(&queries, sketch, quantized, projection, scale, None, &causal())?);
            }
            Operation::PlaneKeys => {
                drop(planes::cpu::encode_keys(codec, &keys, Positions::Start(&self.starts), tables)?);
            }
            Operation::PlaneValues => drop(planes::cpu::encode_values(codec, &values)?),
            Operation::PlaneScores => drop(planes::cpu::scores(codec, &queries, &self.key_codes, tables)?),
            Operation::PlaneAttend => drop(planes::cpu::attend(codec, &queries, &stored, None, &causal())?),
        }
        Ok(())
    }
}
