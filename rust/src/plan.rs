//! From layouts to a plan: what each field's batch is, and which bytes go where.
//!
//! Pure: the same layouts give the same plan, on any machine. Nothing is allocated, read or
//! written for the data itself, so a plan can be printed before it is carried out.

use std::cmp::Reverse;
use std::iter::{once, repeat_n};
use std::ops::Range;

use crate::align::align_up;
use crate::dtype::DType;
use crate::error::PlanError;
use crate::shape::{self, Dims};
use crate::source::Layouts;

/// How the items of a field become its batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Stacked in a new first dimension.
    Batched,
    /// Concatenated along a dimension, padded with zeros where other dimensions differ.
    Flat {
        /// The concat dimension; negative ones count from the end.
        dim: i64,
    },
    /// The same for every item: the first item's is the batch's.
    Shared,
}

/// Where a field's batch lives once collated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// On the host for good (`keep_on_cpu`).
    Cpu,
    /// Bound for the device.
    Device,
}

/// What a field becomes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Way<G = Output> {
    /// The first value itself.
    Alias,
    /// A view of the only leaf with a new first dimension.
    View,
    /// The values themselves, in a list; of a flat field what they, lists too, hold.
    List,
    /// The leaves' bytes, side by side in one segment.
    Gather(G),
}

impl<G> Way<G> {
    /// The same way, with what a gather takes made into something else.
    pub fn map<H>(self, change: impl FnOnce(G) -> H) -> Way<H> {
        match self {
            Self::Alias => Way::Alias,
            Self::View => Way::View,
            Self::List => Way::List,
            Self::Gather(gather) => Way::Gather(change(gather)),
        }
    }
}

/// A field's batch as one dense tensor, before it has a place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// Element type.
    pub dtype: DType,
    /// Sizes of the batch.
    pub sizes: Dims,
    /// Bytes of the batch.
    pub nbytes: usize,
    /// What fills it; offsets count from its first byte, leaves from the field's first.
    pub moves: Moves,
}

impl Output {
    /// Bytes of the leaves that lie in the output as they are, one after the other; none if
    /// leaves have gaps or interleave.
    pub fn whole_leaves(&self) -> impl Iterator<Item = usize> + '_ {
        let (rows, ends) = match &self.moves {
            Moves::Rows { len } => (Some(*len), &[][..]),
            Moves::Runs(ends) => (None, &ends[..]),
            Moves::Blocks { .. } => (None, &[][..]),
        };
        let count = |len: usize| self.nbytes.checked_div(len).unwrap_or(0);
        let rows = rows.into_iter().flat_map(move |len| repeat_n(len, count(len)));
        let starts = once(0).chain(ends.iter().copied());
        rows.chain(ends.iter().zip(starts).map(|(end, start)| end - start))
    }

    /// Which of `count` leaves have bytes in a range of the output; others may be among them.
    pub fn leaves_in(&self, range: &Range<usize>, count: usize) -> Range<usize> {
        match &self.moves {
            _ if range.is_empty() => 0..0,
            Moves::Rows { len } => range.start / len..range.end.div_ceil(*len),
            Moves::Runs(ends) => {
                let first = ends.partition_point(|&end| end <= range.start);
                first..ends.partition_point(|&end| end < range.end) + 1
            }
            Moves::Blocks { .. } => 0..count,
        }
    }
}

/// How the leaves fill an output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Moves {
    /// Contiguous leaves of the same number of bytes, one after the other.
    Rows {
        /// Bytes of each leaf.
        len: usize,
    },
    /// Contiguous leaves, one after the other: where each ends.
    Runs(Vec<usize>),
    /// Leaves with gaps, or that interleave or leave padding: one block each.
    Blocks {
        /// Whether part of the output is padding, to be filled with zeros first.
        zero: bool,
        /// One block for each leaf.
        blocks: Vec<Block>,
    },
}

/// A copy of a box of elements: nested loops over runs of bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Where the leaf's first element goes, in bytes from the output's first.
    pub offset: usize,
    /// Bytes copied at each step of the innermost loop; 0 if the leaf has no elements.
    pub run: usize,
    /// Loops, outermost first.
    pub loops: Vec<Loop>,
}

/// One loop of a [`Block`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loop {
    /// Number of steps; at least 2.
    pub count: usize,
    /// Bytes to the next step in the leaf.
    pub source_step: isize,
    /// Bytes to the next step in the output.
    pub output_step: usize,
}

/// What a field of `count` tensors becomes, where no layout decides it: such leaves need not even
/// be read.
pub fn plan_unread<G>(kind: Kind, count: usize) -> Option<Way<G>> {
    match kind {
        Kind::Shared => Some(Way::Alias),
        Kind::Batched if count == 1 => Some(Way::View),
        Kind::Flat { .. } if count == 1 => Some(Way::Alias),
        Kind::Batched | Kind::Flat { .. } => None,
    }
}

/// What a field of values that are no tensors becomes; `None` if no way but the reference's.
pub fn plan_values<G>(kind: Kind) -> Option<Way<G>> {
    match kind {
        Kind::Shared => Some(Way::Alias),
        Kind::Batched | Kind::Flat { dim: 0 } => Some(Way::List),
        Kind::Flat { .. } => None,
    }
}

/// What a field of tensors becomes.
///
/// # Errors
///
/// What the reference treats in its own way or refuses: mixed ranks or a dimension out of range in
/// a flat field, expanded leaves, sizes beyond 64 bits.
pub fn plan_field(kind: Kind, leaves: &Layouts) -> Result<Way, PlanError> {
    if let Some(way) = plan_unread(kind, leaves.len()) {
        return Ok(way);
    }
    match kind {
        Kind::Flat { dim } => concat(leaves, dim).map(Way::Gather),
        _ if !leaves.uniform() => Ok(Way::List),
        _ => stack(leaves).map(Way::Gather),
    }
}

/// One leaf as a dense tensor of its own, with a new first dimension if `leading`: what a device
/// gets of a leaf that is neither stacked nor concatenated.
///
/// # Errors
///
/// An expanded leaf, or sizes beyond 64 bits.
pub fn plan_dense(leaf: &Layouts, leading: bool) -> Result<Output, PlanError> {
    if leaf.expanded() {
        return Err(PlanError::Expanded);
    }
    let mut sizes = Dims::new();
    if leading {
        sizes.push(1);
    }
    sizes.extend_from_slice(leaf.sizes(0));
    let nbytes = shape::byte_count(&sizes, leaf.item_size())?;
    Ok(Output { dtype: leaf.dtype(), sizes, nbytes, moves: rows(leaf, nbytes)? })
}

fn stack(leaves: &Layouts) -> Result<Output, PlanError> {
    if leaves.expanded() {
        return Err(PlanError::Expanded);
    }
    let leaf_sizes = leaves.sizes(0);
    let mut sizes = Dims::with_capacity(leaf_sizes.len() + 1);
    sizes.push(i64::try_from(leaves.len()).map_err(|_| PlanError::TooLarge)?);
    sizes.extend_from_slice(leaf_sizes);
    let nbytes = shape::byte_count(&sizes, leaves.item_size())?;
    let leaf_bytes = shape::byte_count(leaf_sizes, leaves.item_size())?;
    Ok(Output { dtype: leaves.dtype(), sizes, nbytes, moves: rows(leaves, leaf_bytes)? })
}

/// Leaves of the same sizes, of `leaf_bytes` bytes each, one after the other.
fn rows(leaves: &Layouts, leaf_bytes: usize) -> Result<Moves, PlanError> {
    if leaves.all_contiguous() {
        return Ok(Moves::Rows { len: leaf_bytes });
    }
    let strides = shape::contiguous_strides(leaves.sizes(0))?;
    let blocks = (0..leaves.len()).map(|leaf| block(leaves, leaf, leaf * leaf_bytes, &strides));
    Ok(Moves::Blocks { zero: false, blocks: blocks.collect::<Result<_, _>>()? })
}

fn concat(leaves: &Layouts, dim: i64) -> Result<Output, PlanError> {
    if leaves.mixed_ranks() {
        return Err(PlanError::RankMismatch);
    }
    if leaves.expanded() {
        return Err(PlanError::Expanded);
    }
    let dim = shape::resolve_dim(dim, leaves.rank())?;
    let item_size = leaves.item_size();

    let mut sizes = Dims::from_slice(leaves.sizes(0));
    let mut padded = false;
    for leaf in 1..leaves.len() {
        for (d, &size) in leaves.sizes(leaf).iter().enumerate() {
            if d == dim {
                sizes[d] = sizes[d].checked_add(size).ok_or(PlanError::TooLarge)?;
            } else if size != sizes[d] {
                padded = true;
                sizes[d] = sizes[d].max(size);
            }
        }
    }
    let nbytes = shape::byte_count(&sizes, item_size)?;
    let output = |moves| Output { dtype: leaves.dtype(), sizes: sizes.clone(), nbytes, moves };

    let in_order = sizes[..dim].iter().all(|&size| size == 1);
    if in_order && !padded && leaves.all_contiguous() {
        return Ok(output(if leaves.uniform() {
            Moves::Rows { len: shape::byte_count(leaves.sizes(0), item_size)? }
        } else {
            let mut end: usize = 0;
            let mut ends = Vec::with_capacity(leaves.len());
            for leaf in 0..leaves.len() {
                let nbytes = shape::byte_count(leaves.sizes(leaf), item_size)?;
                end = end.checked_add(nbytes).ok_or(PlanError::TooLarge)?;
                ends.push(end);
            }
            Moves::Runs(ends)
        }));
    }

    let strides = shape::contiguous_strides(&sizes)?;
    let step = to_usize(strides[dim])?.checked_mul(item_size).ok_or(PlanError::TooLarge)?;
    let mut offset: usize = 0;
    let mut blocks = Vec::with_capacity(leaves.len());
    for leaf in 0..leaves.len() {
        blocks.push(block(leaves, leaf, offset, &strides)?);
        let advance = to_usize(leaves.sizes(leaf)[dim])?.checked_mul(step);
        offset = advance.and_then(|by| offset.checked_add(by)).ok_or(PlanError::TooLarge)?;
    }
    Ok(output(Moves::Blocks { zero: padded, blocks }))
}

/// The copy of one leaf to `offset` of an output whose strides are `output_strides`, with as few
/// and as long runs as both layouts allow.
fn block(
    leaves: &Layouts,
    leaf: usize,
    offset: usize,
    output_strides: &[i64],
) -> Result<Block, PlanError> {
    let item_size = leaves.item_size();
    let sizes = leaves.sizes(leaf);
    if shape::byte_count(sizes, item_size)? == 0 {
        return Ok(Block { offset, run: 0, loops: Vec::new() });
    }
    let dense = shape::contiguous_strides(sizes)?;
    let source_strides = leaves.strides(leaf).unwrap_or(&dense);

    let mut run = item_size;
    let mut loops: Vec<Loop> = Vec::with_capacity(sizes.len());
    for d in (0..sizes.len()).rev() {
        let count = to_usize(sizes[d])?;
        if count == 1 {
            continue;
        }
        let source_step = to_bytes(source_strides[d], item_size)?;
        let output_step = to_usize(to_bytes(output_strides[d], item_size)? as i64)?;
        let adjoins = |inner_source: isize, inner_output: usize, inner_count: usize| {
            inner_source.checked_mul(inner_count as isize) == Some(source_step)
                && inner_output.checked_mul(inner_count) == Some(output_step)
        };
        match loops.last_mut() {
            None if adjoins(run as isize, run, 1) => {
                run = run.checked_mul(count).ok_or(PlanError::TooLarge)?;
            }
            Some(inner) if adjoins(inner.source_step, inner.output_step, inner.count) => {
                inner.count = inner.count.checked_mul(count).ok_or(PlanError::TooLarge)?;
            }
            _ => loops.push(Loop { count, source_step, output_step }),
        }
    }
    loops.reverse();
    Ok(Block { offset, run, loops })
}

fn to_usize(value: i64) -> Result<usize, PlanError> {
    usize::try_from(value).map_err(|_| PlanError::TooLarge)
}

fn to_bytes(stride: i64, item_size: usize) -> Result<isize, PlanError> {
    isize::try_from(stride)
        .ok()
        .and_then(|stride| stride.checked_mul(item_size as isize))
        .ok_or(PlanError::TooLarge)
}

/// Places outputs one after the other into a buffer, each at an aligned offset.
#[derive(Clone, Debug, Default)]
pub struct Buffer {
    nbytes: usize,
}

impl Buffer {
    /// Reserves a segment and returns its offset.
    pub fn place(&mut self, nbytes: usize) -> Result<usize, PlanError> {
        let offset = align_up(self.nbytes)?;
        self.nbytes = offset
            .checked_add(nbytes)
            .filter(|&end| isize::try_from(end).is_ok())
            .ok_or(PlanError::TooLarge)?;
        Ok(offset)
    }

    /// Bytes from the start of the first segment to the end of the last.
    pub fn nbytes(&self) -> usize {
        self.nbytes
    }
}

/// What a layout needs to know of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    /// Bytes of the output.
    pub nbytes: usize,
    /// Whether its elements are floating point numbers.
    pub floating: bool,
    /// Whether it is to have an allocation of its own: it may be kept longer than the others.
    pub own: bool,
}

/// Where outputs lie, in a host buffer that holds all of them and in the allocations on a device
/// that they are copied to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// For each output, its first byte in the host buffer.
    pub offsets: Vec<usize>,
    /// For each output, which allocation it is in.
    pub part_of: Vec<usize>,
    /// For each allocation, the range of the host buffer that it is a copy of.
    pub parts: Vec<Range<usize>>,
    /// The outputs in the order of their places.
    pub order: Vec<usize>,
}

/// Lays outputs out: one allocation for all that need none of their own.
///
/// There the largest floating point output comes first, at offset 0, and the others by falling
/// size. So the place of the tensor that a compiled model reads does not change with what comes
/// along with it, nor with the order of the names.
///
/// # Errors
///
/// Sizes beyond 64 bits.
pub fn lay_out(demands: &[Demand]) -> Result<Layout, PlanError> {
    let mut order: Vec<_> = (0..demands.len()).collect();
    order.sort_by_key(|&output| {
        let Demand { nbytes, own, .. } = demands[output];
        (own, Reverse(nbytes))
    });
    let floats = |&&output: &&usize| demands[output].floating && !demands[output].own;
    if let Some(&largest) = order.iter().find(floats) {
        let at = order.iter().position(|&output| output == largest).unwrap_or(0);
        order[..=at].rotate_right(1);
    }
    let mut buffer = Buffer::default();
    let mut layout = Layout {
        offsets: vec![0; demands.len()],
        part_of: vec![0; demands.len()],
        parts: Vec::new(),
        order,
    };
    for &output in &layout.order {
        let Demand { nbytes, own, .. } = demands[output];
        let start = buffer.place(nbytes)?;
        layout.offsets[output] = start;
        match layout.parts.last_mut() {
            Some(common) if !own => common.end = buffer.nbytes(),
            _ => layout.parts.push(start..buffer.nbytes()),
        }
        layout.part_of[output] = layout.parts.len() - 1;
    }
    Ok(layout)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::code;

    const F32: DType = DType::new(code::FLOAT, 32);

    fn leaves(all: &[(&[i64], &[i64])]) -> Layouts {
        let mut layouts = Layouts::new(F32, 4, all[0].0, all[0].1);
        for (sizes, strides) in &all[1..] {
            layouts.push(sizes, strides);
        }
        layouts
    }

    fn gathered(kind: Kind, leaves: &Layouts) -> Output {
        match plan_field(kind, leaves) {
            Ok(Way::Gather(output)) => output,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn one_leaf_is_not_copied() {
        let one = leaves(&[(&[2, 3], &[3, 1])]);
        assert_eq!(plan_field(Kind::Batched, &one), Ok(Way::View));
        assert_eq!(plan_field(Kind::Flat { dim: 0 }, &one), Ok(Way::Alias));
        assert_eq!(plan_field(Kind::Flat { dim: 7 }, &one), Ok(Way::Alias));
        assert_eq!(plan_field(Kind::Shared, &one), Ok(Way::Alias));
    }

    #[test]
    fn ragged_leaves_become_a_list_if_batched() {
        for other in [&[2, 4][..], &[2, 3, 1], &[]] {
            let ragged = leaves(&[(&[2, 3], &[3, 1]), (other, &[1, 1, 1][..other.len()])]);
            assert_eq!(plan_field(Kind::Batched, &ragged), Ok(Way::List));
        }
    }

    #[test]
    fn contiguous_leaves_are_rows_or_runs() {
        let rows = gathered(Kind::Batched, &leaves(&[(&[3], &[1]), (&[3], &[1])]));
        assert_eq!(rows.moves, Moves::Rows { len: 12 });
        assert_eq!(rows.sizes.as_slice(), &[2, 3]);
        let runs = leaves(&[(&[2, 3], &[3, 1]), (&[5, 3], &[3, 1])]);
        let runs = gathered(Kind::Flat { dim: -2 }, &runs);
        assert_eq!(runs.moves, Moves::Runs(vec![24, 84]));
        assert_eq!(runs.whole_leaves().collect::<Vec<_>>(), [24, 60]);
        let among = |start: usize, end: usize| runs.leaves_in(&(start..end), 2);
        assert_eq!(
            [among(0, 84), among(0, 24), among(24, 25), among(23, 25)],
            [0..2, 0..1, 1..2, 0..2]
        );
        assert_eq!((among(7, 7), rows.leaves_in(&(13..24), 2)), (0..0, 1..2));
        assert_eq!(runs.sizes.as_slice(), &[7, 3]);
    }

    #[test]
    fn interleaved_leaves_copy_the_longest_runs() {
        let along_dim_1 = leaves(&[(&[2, 3], &[3, 1]), (&[2, 5], &[5, 1])]);
        let Moves::Blocks { zero, blocks } = gathered(Kind::Flat { dim: 1 }, &along_dim_1).moves
        else {
            panic!("expected blocks");
        };
        assert!(!zero);
        let step = Loop { count: 2, source_step: 20, output_step: 32 };
        assert_eq!(blocks[1], Block { offset: 12, run: 20, loops: vec![step] });
    }

    #[test]
    fn other_dimensions_that_differ_are_padded() {
        let padded = leaves(&[(&[2, 3], &[3, 1]), (&[1, 5], &[5, 1])]);
        let output = gathered(Kind::Flat { dim: 0 }, &padded);
        assert_eq!(output.sizes.as_slice(), &[3, 5]);
        assert!(matches!(output.moves, Moves::Blocks { zero: true, .. }));
    }

    #[test]
    fn what_the_reference_refuses_is_not_planned() {
        let scalars = leaves(&[(&[], &[]), (&[], &[])]);
        assert_eq!(plan_field(Kind::Flat { dim: 0 }, &scalars), Err(PlanError::DimOutOfRange));
        let ranks = leaves(&[(&[2], &[1]), (&[2, 3], &[3, 1])]);
        assert_eq!(plan_field(Kind::Flat { dim: 0 }, &ranks), Err(PlanError::RankMismatch));
    }

    #[test]
    fn what_an_expanded_leaf_declares_is_never_sized() {
        let huge: (&[i64], &[i64]) = (&[1 << 40, 1 << 40], &[0, 0]);
        let two = leaves(&[huge, huge]);
        assert_eq!(plan_field(Kind::Batched, &two), Err(PlanError::Expanded));
        assert_eq!(plan_field(Kind::Flat { dim: 0 }, &two), Err(PlanError::Expanded));
        let ragged = leaves(&[huge, (&[1 << 50], &[0])]);
        assert_eq!(plan_field(Kind::Batched, &ragged), Ok(Way::List));
    }

    #[test]
    fn sizes_beyond_64_bits_are_refused() {
        let large: (&[i64], &[i64]) = (&[1 << 62], &[1]);
        assert_eq!(plan_field(Kind::Batched, &leaves(&[large, large])), Err(PlanError::TooLarge));
        let flat = Kind::Flat { dim: 0 };
        assert_eq!(plan_field(flat, &leaves(&[large, large])), Err(PlanError::TooLarge));
    }

    #[test]
    fn a_leaf_alone_is_made_dense() {
        let strided = leaves(&[(&[2, 3], &[1, 2])]);
        let output = plan_dense(&strided, true).unwrap();
        assert_eq!(output.sizes.as_slice(), &[1, 2, 3]);
        assert!(matches!(output.moves, Moves::Blocks { zero: false, .. }));
        let scalar = plan_dense(&leaves(&[(&[], &[])]), false).unwrap();
        assert_eq!((scalar.sizes.len(), scalar.nbytes), (0, 4));
        let expanded = leaves(&[(&[1 << 40], &[0])]);
        assert_eq!(plan_dense(&expanded, false), Err(PlanError::Expanded));
    }

    #[test]
    fn the_largest_floating_output_comes_first() {
        let demand = |nbytes, floating, own| Demand { nbytes, floating, own };
        let demands = [
            demand(10, true, false),
            demand(900, false, false),
            demand(300, true, false),
            demand(0, true, false),
            demand(5, true, true),
            demand(2000, true, true),
        ];
        let layout = lay_out(&demands).unwrap();
        assert_eq!(layout.offsets, [1536, 512, 0, 1792, 3840, 1792]);
        assert_eq!(layout.part_of, [0, 0, 0, 0, 2, 1]);
        assert_eq!(layout.parts, [0..1792, 1792..3792, 3840..3845]);
        assert_eq!(lay_out(&[]).unwrap(), Layout::default());
    }

    #[test]
    fn segments_are_aligned_and_do_not_overlap() {
        let mut buffer = Buffer::default();
        let offsets: Vec<_> = [3, 0, 256, 1].map(|nbytes| buffer.place(nbytes)).into();
        assert_eq!(offsets, [Ok(0), Ok(256), Ok(256), Ok(512)]);
        assert_eq!(buffer.nbytes(), 513);
        assert_eq!(buffer.place(usize::MAX), Err(PlanError::TooLarge));
        assert_eq!(buffer.nbytes(), 513);
    }
}
