//! The recorders of coded directions: `refill`, `expand` and `turn` of `shaders/minicache/`, and attention over them.

use std::sync::{Arc, Mutex, PoisonError};

use super::super::config::DirectionPlanes;
use super::super::folded::Layout;
use super::Ops;
use super::buffers::FoldedBuffers;
use super::params::{ExpandParams, RefillParams, TurnParams};
use super::variants::{attend_coded_variant, expand_variant, half_width, refill_variant, turn_variant};
use crate::attention::gpu::{Parts, Pass, RowKind, Span, Tiling};
use crate::attention::{AttendOptions, Geometry};
use crate::error::Result;
use crate::gpu::{Dispatch, Gpu, KvView, Recording, Window, index32};
use crate::qjl::planes::gpu::{CodecBuffer, Ops as PlaneOps};
use crate::qjl::planes::{Balance, Centring, Codec, PlanesOptions};
use crate::tensor::{DType, Shape, Strides, checked_bytes};

/// What directions of a width are coded with, by width; uploaded once for as long as operations live.
#[derive(Clone, Debug, Default)]
pub(super) struct Coders(Arc<Mutex<Vec<(DirectionPlanes, CodecBuffer)>>>);

impl Coders {
    fn get(&self, gpu: &Gpu, dim: usize, planes: DirectionPlanes) -> Result<CodecBuffer> {
        // A panic of another holder leaves whole codecs.
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = all.iter().find(|(of, codec)| *of == planes && codec.codec().value_dim() == dim);
        if let Some((_, codec)) = known {
            return Ok(codec.clone());
        }
        let options = PlanesOptions::default().centring(Centring::None).balance(Balance::None);
        let options = options.key_planes(planes.bits).value_planes(planes.bits);
        let options = options.rounds(planes.rounds).seed(planes.seed).sinks(0).recent(0);
        let codec = PlaneOps::new(gpu).upload_codec(&Codec::new(options, dim, dim, None)?)?;
        all.push((planes, codec.clone()));
        Ok(codec)
    }
}

/// What of the values a pass over coded directions sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::minicache) enum Values {
    /// Those whose directions are coded: its sums are rotated.
    Coded,
    /// Those that stayed raw.
    Raw,
}

impl Values {
    /// Whether a store has such values.
    pub(in crate::minicache) const fn are_in(self, folded: &FoldedBuffers) -> bool {
        match self {
            Self::Coded => folded.totals.slots > 0,
            Self::Raw => folded.totals.side > 0,
        }
    }
}

/// How a pass over coded directions is divided.
pub(in crate::minicache) const fn coded_tiling(g: Geometry, value_dim: usize) -> Tiling {
    Tiling::rows(Geometry { key_dim: 2 * half_width(g.key_dim), ..g }, value_dim)
}

impl Ops {
    /// What directions of a layout are coded with; `None` where they are not.
    pub(in crate::minicache) fn coder(&self, layout: &Layout) -> Result<Option<CodecBuffer>> {
        layout.planes.map(|planes| self.coders.get(&self.gpu, layout.shape.dim, planes)).transpose()
    }

    /// Codes the directions of a folded pair, in a store of exactly what that needs.
    pub(super) fn code(
        &self,
        recording: &mut Recording<'_>,
        whole: FoldedBuffers,
        planes: DirectionPlanes,
    ) -> Result<FoldedBuffers> {
        let (layout, totals) = (whole.layout.coded(Some(planes)), whole.totals);
        let (Some(coder), Some(old)) = (self.coder(&layout)?, &whole.store) else { return Ok(whole) };
        let (codes, scales_at) = if totals.slots > 0 {
            let slots = Shape::new(1, 1, totals.slots as usize, layout.shape.dim)?;
            let pitch = 2 * whole.layout.slot_words();
            let strides = Strides { batch: 0, heads: 0, tokens: pitch };
            let first = 2 * totals.sections(&whole.layout).slots as usize;
            let rows = KvView::new(old, DType::F16, slots).at(first).strides(strides);
            PlaneOps::new(&self.gpu).encode_rows(recording, &rows, &coder)?
        } else {
            (old.clone(), 0)
        };
        self.refill(recording, &whole, layout, (&codes, Some(scales_at)))
    }

    /// Fills a store anew with other slots: codes, whose scalars begin at a word, or directions.
    fn refill(
        &self,
        recording: &mut Recording<'_>,
        old: &FoldedBuffers,
        layout: Layout,
        (slots, scales_at): (&wgpu::Buffer, Option<usize>),
    ) -> Result<FoldedBuffers> {
        let totals = old.totals;
        let bytes = totals.bytes(&layout);
        let Some(from) = &old.store else { return Ok(FoldedBuffers { layout, totals, store: None }) };
        let store = self.gpu.storage("folded pair", bytes)?;
        let variant = refill_variant(&layout, scales_at.is_some());
        recording.add(Dispatch {
            workgroups: (bytes / 4).div_ceil(u64::from(variant.workgroup())),
            variant,
            params: RefillParams {
                old: totals.sections(&old.layout),
                fresh: totals.sections(&layout),
                words: (bytes / 4) as u32,
                scales_at: index32(scales_at.unwrap_or_default())?,
                padding: [0; 2],
            },
            buffers: &[from, slots, &store].map(Window::whole),
        })?;
        Ok(FoldedBuffers { layout, totals, store: Some(store) })
    }

    /// The store that coded directions stand for: directions in f16 again, over the scalars that are in the magnitudes.
    pub(super) fn expand(
        &self,
        recording: &mut Recording<'_>,
        folded: &FoldedBuffers,
    ) -> Result<FoldedBuffers> {
        let (layout, totals) = (folded.layout, folded.totals);
        let (Some(coder), Some(planes), Some(store)) = (self.coder(&layout)?, layout.planes, &folded.store)
        else {
            return Ok(FoldedBuffers { layout: layout.whole(), ..folded.clone() });
        };
        let whole = layout.whole();
        let sizes = [totals.slots as usize, whole.slot_words()];
        let directions =
            self.gpu.storage("directions", checked_bytes("directions", &sizes, 4)?.max(4) as u64)?;
        if let Some(rotation) = coder.codec().rotations().get(layout.shape.dim) {
            recording.add(Dispatch {
                variant: expand_variant(&layout, rotation, planes.rounds),
                params: ExpandParams {
                    coded: totals.sections(&layout),
                    slots: totals.slots,
                    padding: [0; 3],
                },
                buffers: &[store, &directions, coder.rotations()].map(Window::whole),
                workgroups: u64::from(totals.slots).div_ceil(2),
            })?;
        }
        self.refill(recording, folded, whole, (&directions, None))
    }

    /// Queries in both bases: `[batch, query_heads, queries, 2 * half_width]` in f32.
    pub(in crate::minicache) fn turn(
        &self,
        recording: &mut Recording<'_>,
        queries: &KvView,
        planes: DirectionPlanes,
    ) -> Result<KvView> {
        let shape = queries.shape();
        let coder = self.coders.get(&self.gpu, shape.dim, planes)?;
        let turned = Shape { dim: 2 * half_width(shape.dim), ..shape };
        let bytes = checked_bytes("turned queries", &[turned.elements()], 4)?.max(4);
        let buffer = self.gpu.scratch("turned queries", bytes as u64)?;
        let (input, view) = queries.bind_input("queries", &self.gpu)?;
        if let Some(rotation) = coder.codec().rotations().get(shape.dim) {
            recording.add(Dispatch {
                variant: turn_variant(queries.dtype(), rotation, planes.rounds),
                params: TurnParams { view },
                buffers: &[input, Window::whole(&buffer), Window::whole(coder.rotations())],
                workgroups: shape.rows() as u64,
            })?;
        }
        Ok(KvView::new(&buffer, DType::F32, turned))
    }

    /// Attention of one layer over one pass's store of coded directions, of the values of one kind; nothing where there are
    /// none. `queries` have been turned.
    pub(in crate::minicache) fn attend_coded(
        &self,
        recording: &mut Recording<'_>,
        pass: &Pass,
        queries: &KvView,
        folded: [&FoldedBuffers; 2],
        (member, seen): (usize, Values),
    ) -> Result<()> {
        let [keys, values] = folded.map(|folded| &folded.layout);
        let variant = attend_coded_variant(keys, values.shape.dim, seen == Values::Coded);
        self.attend_by(recording, variant, pass, queries, folded, member)
    }

    /// Joins what passes over coded values and over raw ones have left: the former is turned back.
    pub(in crate::minicache) fn join_coded(
        &self,
        recording: &mut Recording<'_>,
        [coded, raw]: [&Parts; 2],
        (value_dim, planes): (usize, DirectionPlanes),
        options: &AttendOptions<'_>,
        output: &KvView,
    ) -> Result<()> {
        let coder = self.coders.get(&self.gpu, value_dim, planes)?;
        let none = Parts { splits: 0, ..raw.clone() };
        PlaneOps::new(&self.gpu).join(recording, [coded, raw, &none], &coder, options, output)
    }

    /// Attention of one layer over a folded pair whose directions are coded.
    pub(super) fn attend_both(
        &self,
        recording: &mut Recording<'_>,
        g: Geometry,
        (queries, output): (&KvView, &KvView),
        (folded, member): ([&FoldedBuffers; 2], usize),
        spans: &[Span],
        options: &AttendOptions<'_>,
    ) -> Result<()> {
        let [keys, values] = folded;
        let (value_dim, Some(planes)) = (values.layout.shape.dim, keys.layout.planes) else { return Ok(()) };
        let pass =
            |kind| Pass::of(&self.gpu, (kind, spans, coded_tiling(g, value_dim)), g, value_dim, options);
        let passes = [(pass(RowKind::Coded)?, Values::Coded), (pass(RowKind::Raw)?, Values::Raw)];
        if output.shape().elements() == 0 {
            return Ok(());
        }
        let turned = self.turn(recording, queries, planes)?;
        for (pass, seen) in &passes {
            self.attend_coded(recording, pass, &turned, folded, (member, *seen))?;
        }
        let parts = passes.each_ref().map(|(pass, _)| pass.parts());
        self.join_coded(recording, [&parts[0], &parts[1]], (value_dim, planes), options, output)
    }
}
