//! The recorders: each records the kernel of the same name in `shaders/minicache/`.

use super::super::cache::CAUSE_WORDS;
use super::super::config::{MergeOptions, Retention};
use super::super::cut::{Cut, Frame};
use super::super::folded::{Layout, PAGE, Page, Totals, check_merge};
use super::buffers::{Decided, FoldedBuffers, Rows, Source};
use super::params::{
    ArrangeParams, AttendParams, GroupMergeParams, GroupSimilarityParams, MergeParams, RestoreParams,
    RetainParams, SimilarityParams, ThresholdParams,
};
use super::variants::{
    arrange_variant, attend_variant, group_similarity_variant, retain_variant, similarity_variant,
    store_variant, threshold_variant,
};
use super::{LANES, Ops, ROW_BYTES, STATUS_BYTES, bind_pair};
use crate::attention::gpu::Pass;
use crate::error::Result;
use crate::gpu::{Dispatch, Kernel, KvView, Recording, Variant, ViewUse, Window, index32};
use crate::tensor::{Shape, checked_bytes};

impl Ops {
    /// Measures and decides every row of a pair, by `frozen` verdicts of other rows where there are any.
    pub(in crate::minicache) fn decide(
        &self,
        recording: &mut Recording<'_>,
        [lower, upper]: [&KvView; 2],
        options: &MergeOptions,
        frozen: Option<(&wgpu::Buffer, Frame)>,
    ) -> Result<Decided> {
        let layout = check_merge((lower.shape(), lower.dtype()), (upper.shape(), upper.dtype()), options)?;
        let rows = self.similarity(recording, &layout, lower, upper, options)?;
        let source = Source::Pair { lower: lower.clone(), upper: upper.clone() };
        self.decide_rows(recording, rows, source, options, frozen)
    }

    /// Measures and decides every row of a group: `layers` are `[layers, heads, tokens, dim]`, rows at whole words.
    pub(in crate::minicache) fn decide_group(
        &self,
        recording: &mut Recording<'_>,
        layers: &KvView,
        options: &MergeOptions,
        frozen: Option<(&wgpu::Buffer, Frame)>,
    ) -> Result<Decided> {
        let (rows, scales) = self.group_similarity(recording, layers, options)?;
        let source = Source::Group { layers: layers.clone(), scales };
        self.decide_rows(recording, rows, source, options, frozen)
    }

    fn decide_rows(
        &self,
        recording: &mut Recording<'_>,
        rows: Rows,
        source: Source,
        options: &MergeOptions,
        frozen: Option<(&wgpu::Buffer, Frame)>,
    ) -> Result<Decided> {
        let layout = rows.layout;
        let frame = frozen.map_or(Frame { first: 0, tokens: layout.shape.tokens }, |(_, frame)| frame);
        let cuts = match frozen {
            Some((cuts, _)) => cuts.clone(),
            None => self.threshold(recording, &rows, options)?,
        };
        let pages = layout.pages() as u64;
        let decided = Decided {
            rows,
            source,
            pages: self.gpu.storage("page table", pages * size_of::<Page>() as u64)?,
            status: self.gpu.storage("status", STATUS_BYTES)?,
            causes: self.gpu.storage("causes", pages * (CAUSE_WORDS * 4) as u64)?,
        };
        let bitmaps = self.gpu.storage("bitmaps", pages * 4)?;
        self.retain(recording, &decided, &cuts, &bitmaps, options, frame)?;
        self.arrange(recording, &decided, &bitmaps, options)?;
        Ok(decided)
    }

    /// Rows of a group, and of every row each layer's norm and weight.
    pub(in crate::minicache) fn group_similarity(
        &self,
        recording: &mut Recording<'_>,
        layers: &KvView,
        options: &MergeOptions,
    ) -> Result<(Rows, wgpu::Buffer)> {
        options.validate()?;
        let count = layers.shape().batch;
        let shape = Shape { batch: 1, ..layers.shape() };
        let layout = Layout::group(shape, layers.dtype(), options.mode, count)?.coded(options.planes);
        let buffer = self.gpu.storage("rows", shape.rows() as u64 * ROW_BYTES)?;
        let scales = checked_bytes("row scales", &[shape.rows(), count, 2], 4)?;
        let scales = self.gpu.storage("row scales", scales as u64)?;
        let rows = Rows { gpu: self.gpu.clone(), layout, buffer };
        let source = layers.bind("layers of a group", ViewUse::Read, &self.gpu)?;
        let variant = group_similarity_variant(&layout).with_subgroups(self.gpu.caps().shuffle_width());
        recording.add(Dispatch {
            workgroups: (shape.rows() as u64).div_ceil(u64::from(variant.workgroup() / LANES)),
            variant,
            params: GroupSimilarityParams {
                rows: index32(shape.rows())?,
                tokens: index32(shape.tokens)?,
                heads: index32(shape.heads)?,
                padding: 0,
                source: source.layout,
            },
            buffers: &[(&source).into(), Window::whole(&rows.buffer), Window::whole(&scales)],
        })?;
        Ok((rows, scales))
    }

    pub(in crate::minicache) fn similarity(
        &self,
        recording: &mut Recording<'_>,
        layout: &Layout,
        lower: &KvView,
        upper: &KvView,
        options: &MergeOptions,
    ) -> Result<Rows> {
        let shape = layout.shape;
        let buffer = self.gpu.storage("rows", shape.rows() as u64 * ROW_BYTES)?;
        let rows = Rows { gpu: self.gpu.clone(), layout: *layout, buffer };
        if shape.rows() == 0 {
            return Ok(rows);
        }
        let (lower, upper) = bind_pair(lower, upper, &self.gpu)?;
        let variant = similarity_variant(layout, lower.paired && upper.paired)
            .with_subgroups(self.gpu.caps().shuffle_width());
        let workgroups = (shape.rows() as u64).div_ceil(u64::from(variant.workgroup() / LANES));
        recording.add(Dispatch {
            variant,
            params: SimilarityParams {
                rows: shape.rows() as u32,
                tokens: shape.tokens as u32,
                heads: shape.heads as u32,
                t: options.slerp_t,
                lower: lower.layout,
                upper: upper.layout,
            },
            buffers: &[(&lower).into(), (&upper).into(), Window::whole(&rows.buffer)],
            workgroups,
        })?;
        Ok(rows)
    }

    /// The verdicts: computed where the rule looks at a whole sequence, known at once otherwise.
    pub(in crate::minicache) fn threshold(
        &self,
        recording: &mut Recording<'_>,
        rows: &Rows,
        options: &MergeOptions,
    ) -> Result<wgpu::Buffer> {
        let shape = rows.layout.shape;
        let all = |cut: Cut| self.gpu.upload("cuts", bytemuck::cast_slice(&vec![cut; shape.batch.max(1)]));
        let (amount, fraction) = match options.retention {
            Retention::Never => return all(Cut::NOTHING),
            Retention::Cosine(threshold) => return all(Cut::below(threshold)),
            Retention::Range(gamma) => (gamma, false),
            Retention::Fraction(rho) => (rho, true),
        };
        let cuts = self.gpu.storage("cuts", (shape.batch.max(1) * size_of::<Cut>()) as u64)?;
        recording.add(Dispatch {
            variant: threshold_variant(rows.layout.mode, fraction),
            params: ThresholdParams {
                sequence_rows: (shape.heads * shape.tokens) as u32,
                tokens: shape.tokens as u32,
                sinks: options.sink_tokens(),
                amount,
            },
            buffers: &[Window::whole(&rows.buffer), Window::whole(&cuts)],
            workgroups: if shape.rows() == 0 { 0 } else { shape.batch as u64 },
        })?;
        Ok(cuts)
    }

    fn retain(
        &self,
        recording: &mut Recording<'_>,
        decided: &Decided,
        cuts: &wgpu::Buffer,
        bitmaps: &wgpu::Buffer,
        options: &MergeOptions,
        frame: Frame,
    ) -> Result<()> {
        let layout = decided.rows.layout;
        let variant = retain_variant(layout.mode);
        let pages_per_workgroup = u64::from(variant.workgroup()) / PAGE as u64;
        recording.add(Dispatch {
            variant,
            params: RetainParams {
                pages: layout.pages() as u32,
                pages_per_head: layout.pages_per_head() as u32,
                tokens: layout.shape.tokens as u32,
                heads: layout.shape.heads as u32,
                sinks: options.sink_tokens(),
                rule_tokens: index32(frame.tokens)?,
                rule_first: index32(frame.first)?,
            },
            buffers: &[&decided.rows.buffer, cuts, bitmaps, &decided.status, &decided.causes]
                .map(Window::whole),
            workgroups: (layout.pages() as u64).div_ceil(pages_per_workgroup),
        })
    }

    fn arrange(
        &self,
        recording: &mut Recording<'_>,
        decided: &Decided,
        bitmaps: &wgpu::Buffer,
        options: &MergeOptions,
    ) -> Result<()> {
        let layout = decided.rows.layout;
        let last_rows = layout.pages_per_head().checked_sub(1).map_or(0, |last| layout.page_rows(last));
        recording.add(Dispatch {
            variant: arrange_variant(&layout),
            params: ArrangeParams {
                pages: layout.pages() as u32,
                pages_per_head: layout.pages_per_head() as u32,
                last_rows: last_rows as u32,
                full_limit: options.raw_limit(PAGE),
                last_limit: options.raw_limit(last_rows),
            },
            buffers: &[bitmaps, &decided.pages, &decided.status].map(Window::whole),
            workgroups: u64::from(layout.pages() > 0),
        })
    }

    /// Folds decided rows into a buffer of exactly what they need.
    pub(in crate::minicache) fn merge(
        &self,
        recording: &mut Recording<'_>,
        decided: &Decided,
        totals: Totals,
    ) -> Result<FoldedBuffers> {
        let layout = decided.rows.layout.whole();
        let bytes = totals.bytes(&layout);
        if bytes == 0 {
            return Ok(FoldedBuffers { layout: decided.rows.layout, totals, store: None });
        }
        let folded = FoldedBuffers { layout, totals, store: Some(self.gpu.storage("folded pair", bytes)?) };
        match &decided.source {
            Source::Pair { lower, upper } => self.merge_pair(recording, decided, [lower, upper], &folded)?,
            Source::Group { layers, scales } => {
                self.group_merge(recording, decided, layers, scales, &folded)?;
            }
        }
        match decided.rows.layout.planes {
            Some(planes) => self.code(recording, folded, planes),
            None => Ok(folded),
        }
    }

    fn merge_pair(
        &self,
        recording: &mut Recording<'_>,
        decided: &Decided,
        [lower, upper]: [&KvView; 2],
        folded: &FoldedBuffers,
    ) -> Result<()> {
        let (layout, Some(store)) = (folded.layout, &folded.store) else { return Ok(()) };
        let (lower, upper) = bind_pair(lower, upper, &self.gpu)?;
        let sections = folded.totals.sections(&layout);
        // Eights of rows have whole vec4s of magnitudes, and their places in other pages' too.
        let vectors = lower.vectors
            && upper.vectors
            && sections.start_at_vectors()
            && layout.shape.tokens.is_multiple_of(8);
        let variant = store_variant(Kernel::Merge, &layout, vectors);
        recording.add(Dispatch {
            workgroups: layout.pages() as u64 * page_parts(&layout, vectors, &variant),
            variant,
            params: MergeParams {
                pages: layout.pages() as u32,
                pages_per_head: layout.pages_per_head() as u32,
                tokens: layout.shape.tokens as u32,
                heads: layout.shape.heads as u32,
                sections,
                lower: lower.layout,
                upper: upper.layout,
            },
            buffers: &[
                (&lower).into(),
                (&upper).into(),
                Window::whole(&decided.rows.buffer),
                Window::whole(&decided.pages),
                Window::whole(store),
            ],
        })
    }

    fn group_merge(
        &self,
        recording: &mut Recording<'_>,
        decided: &Decided,
        layers: &KvView,
        scales: &wgpu::Buffer,
        folded: &FoldedBuffers,
    ) -> Result<()> {
        let (layout, Some(store)) = (folded.layout, &folded.store) else { return Ok(()) };
        let source = layers.bind("layers of a group", ViewUse::Read, &self.gpu)?;
        let variant = store_variant(Kernel::GroupMerge, &layout, false);
        recording.add(Dispatch {
            workgroups: channel_pairs(&layout).div_ceil(u64::from(variant.workgroup())),
            variant,
            params: GroupMergeParams {
                pages: layout.pages() as u32,
                pages_per_head: layout.pages_per_head() as u32,
                tokens: layout.shape.tokens as u32,
                padding: 0,
                sections: folded.totals.sections(&layout),
                source: source.layout,
            },
            buffers: &[
                (&source).into(),
                Window::whole(scales),
                Window::whole(&decided.pages),
                Window::whole(store),
            ],
        })
    }

    /// Attention of one layer over one pass's store; nothing where it holds nothing.
    pub(in crate::minicache) fn attend(
        &self,
        recording: &mut Recording<'_>,
        pass: &Pass,
        queries: &KvView,
        folded: [&FoldedBuffers; 2],
        member: usize,
    ) -> Result<()> {
        let [keys, values] = folded.map(|folded| &folded.layout);
        let variant = attend_variant(keys, values.shape.dim, queries.dtype());
        self.attend_by(recording, variant, pass, queries, folded, member)
    }

    /// Attention by one of the kernel's forms.
    pub(super) fn attend_by(
        &self,
        recording: &mut Recording<'_>,
        variant: Variant,
        pass: &Pass,
        queries: &KvView,
        [keys, values]: [&FoldedBuffers; 2],
        member: usize,
    ) -> Result<()> {
        let (Some(key_store), Some(value_store)) = (&keys.store, &values.store) else { return Ok(()) };
        let query = queries.bind("queries", ViewUse::Read, &self.gpu)?;
        recording.add(Dispatch {
            variant: variant.with_subgroups(self.gpu.caps().shuffle_width()),
            params: AttendParams {
                attention: pass.params,
                query: query.layout,
                keys: keys.totals.sections(&keys.layout),
                values: values.totals.sections(&values.layout),
                pages_per_head: keys.layout.pages_per_head() as u32,
                stored: keys.layout.shape.tokens as u32,
                layer: member as u32,
                units: pass.units as u32,
            },
            buffers: &[
                (&query).into(),
                Window::whole(key_store),
                Window::whole(value_store),
                Window::whole(&pass.spans),
                Window::whole(&pass.partials),
            ],
            workgroups: pass.workgroups,
        })
    }

    pub(in crate::minicache) fn restore(
        &self,
        recording: &mut Recording<'_>,
        folded: &FoldedBuffers,
        member: usize,
        output: &KvView,
    ) -> Result<()> {
        if folded.layout.planes.is_some() {
            let whole = self.expand(recording, folded)?;
            return self.restore(recording, &whole, member, output);
        }
        let layout = folded.layout;
        let Some(store) = &folded.store else { return Ok(()) };
        let shape = output.shape();
        let (output, view) = output.bind_output("restored layer", &self.gpu)?;
        let sections = folded.totals.sections(&layout);
        let vectors =
            shape.dim.is_multiple_of(8) && view.start_at_vectors(layout.dtype) && sections.start_at_vectors();
        let variant = store_variant(Kernel::Restore, &layout, vectors);
        // Invocations, of which one that takes vec4s takes them of four rows.
        let invocations = match vectors {
            true => {
                (shape.batch * shape.heads * shape.tokens.div_ceil(PAGE) * PAGE / 4 * shape.dim / 8) as u64
            }
            false => u64::from(view.words),
        };
        recording.add(Dispatch {
            workgroups: invocations.div_ceil(u64::from(variant.workgroup())),
            variant,
            params: RestoreParams {
                view,
                sections,
                pages_per_head: layout.pages_per_head() as u32,
                stored: layout.shape.tokens as u32,
                layer: member as u32,
                padding: 0,
            },
            buffers: &[Window::whole(store), output],
        })
    }
}

/// Workgroups of a page for `merge`, each of whose invocations takes eight channels, or two, of two rows.
fn page_parts(layout: &Layout, vectors: bool, variant: &Variant) -> u64 {
    let units = layout.shape.dim.div_ceil(if vectors { 8 } else { 2 });
    ((PAGE / 2 * units) as u64).div_ceil(u64::from(variant.workgroup()))
}

/// Invocations of a kernel that takes a channel pair of a row each.
fn channel_pairs(layout: &Layout) -> u64 {
    (layout.pages() * PAGE * layout.shape.dim.div_ceil(2)) as u64
}
