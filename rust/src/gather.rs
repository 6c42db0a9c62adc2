//! The only copy.

use std::ops::Range;
use std::ptr;

use crate::plan::{Block, Loop, Moves, Output};
use crate::pool;
use crate::source::SourcePtr;

/// Address of a segment's first byte.
#[derive(Clone, Copy, Debug)]
pub struct SegmentPtr(*mut u8);

// SAFETY: an address; `gather`'s caller promises that it can be written to wherever it runs.
unsafe impl Send for SegmentPtr {}
// SAFETY: as above; threads that share one write to different bytes.
unsafe impl Sync for SegmentPtr {}

impl SegmentPtr {
    /// An address to gather to. Making one promises nothing yet.
    pub fn new(address: *mut u8) -> Self {
        Self(address)
    }

    /// The address so many bytes further on.
    pub fn plus(self, bytes: usize) -> Self {
        Self(self.0.wrapping_add(bytes))
    }
}

/// Copies the leaves of one field into its segment.
///
/// # Safety
///
/// 1. `output` was planned from the layouts of exactly these leaves, in this order.
/// 2. The bytes of every source are alive until this returns (the contract of [`SourcePtr`]).
/// 3. `segment` is valid for writes of `output.nbytes` bytes and overlaps no source.
pub unsafe fn gather(output: &Output, sources: &[SourcePtr], segment: SegmentPtr) {
    let range = 0..output.nbytes;
    let leaves = output.leaves_in(&range, sources.len());
    // SAFETY: the range is the whole output; the rest is passed on.
    unsafe { gather_range(output, &sources[leaves], segment, range) };
}

/// One range of an output, and where its bytes go.
pub struct Part<'a> {
    /// The output.
    pub output: &'a Output,
    /// Those of its leaves that [`Output::leaves_in`] says.
    pub sources: &'a [SourcePtr],
    /// Where the range's first byte goes.
    pub segment: SegmentPtr,
    /// Which bytes of the output.
    pub range: Range<usize>,
}

/// Writes parts one after the other, or by several threads where that pays: see [`pool`]. Returns
/// how many pieces of it other threads wrote.
///
/// # Safety
///
/// As for [`gather_range`], for each of them; no two overlap.
pub unsafe fn gather_parts(parts: &[Part<'_>]) -> usize {
    let mut total: usize = 0;
    let ends: Vec<_> = parts
        .iter()
        .map(|part| {
            total += part.range.len();
            total
        })
        .collect();
    let write = |start: usize, stop: usize| {
        let first = ends.partition_point(|&end| end <= start);
        for (part, &end) in parts[first..].iter().zip(&ends[first..]) {
            let Part { output, sources, segment, range } = part;
            let part_start = end - range.len();
            if part_start >= stop {
                break;
            }
            let (from, to) = (start.max(part_start), stop.min(end));
            let shown = range.start + (from - part_start)..range.start + (to - part_start);
            // Leaves are counted from the part's first.
            let all = output.leaves_in(range, usize::MAX);
            let some = output.leaves_in(&shown, usize::MAX);
            let some = some.start - all.start..(some.end - all.start).min(sources.len());
            // SAFETY: a range of the part, with its own leaves and its own place; the rest is
            // passed on.
            unsafe {
                gather_range(output, &sources[some], segment.plus(from - part_start), shown);
            }
        }
    };
    if !pool::shares(total) {
        write(0, total);
        return 0;
    }
    pool::run(total.div_ceil(pool::PIECE), &|piece| {
        write(piece * pool::PIECE, ((piece + 1) * pool::PIECE).min(total));
    })
}

/// Whether whole leaves lie in memory as they would in the output: each where the one before it
/// ends.
pub fn is_in_place(output: &Output, sources: &[SourcePtr]) -> bool {
    if matches!(output.moves, Moves::Blocks { .. }) || sources.is_empty() {
        return false;
    }
    let mut here = sources[0].address();
    output.whole_leaves().zip(sources).all(|(nbytes, source)| {
        let in_place = source.address() == here;
        here = here.wrapping_add(nbytes);
        in_place
    })
}

/// Writes zeros.
///
/// # Safety
///
/// `segment` is valid for writes of `nbytes` bytes.
pub unsafe fn zero(segment: SegmentPtr, nbytes: usize) {
    if nbytes > 0 {
        // SAFETY: by the contract above.
        unsafe { ptr::write_bytes(segment.0, 0, nbytes) };
    }
}

/// Writes one range of an output's bytes; `segment` is where the range's first byte goes, `sources`
/// are the leaves that [`Output::leaves_in`] says.
///
/// # Safety
///
/// As for [`gather`], but that `segment` needs to be valid for `range.len()` bytes only. The range
/// lies inside the output.
pub unsafe fn gather_range(
    output: &Output,
    sources: &[SourcePtr],
    segment: SegmentPtr,
    range: Range<usize>,
) {
    debug_assert!(range.start <= range.end && range.end <= output.nbytes);
    if range.is_empty() {
        return;
    }
    let window = Window { segment: segment.0, range };
    match &output.moves {
        Moves::Rows { len } => {
            // The range is not empty, so the rows are not.
            let first = window.range.start / len;
            for (row, source) in (first..).zip(sources) {
                // SAFETY: the plan made the output a whole number of rows (1), so the row lies
                // inside it; the leaf holds `len` bytes (1, 2).
                unsafe { window.write(source.address(), row * len, *len) };
            }
        }
        Moves::Runs(ends) => {
            let first = output.leaves_in(&window.range, ends.len()).start;
            let mut start = if first == 0 { 0 } else { ends[first - 1] };
            for (source, &end) in sources.iter().zip(&ends[first..]) {
                // SAFETY: the runs end at `output.nbytes` at the latest (1), so this one lies
                // inside it; the leaf holds its bytes (1, 2).
                unsafe { window.write(source.address(), start, end - start) };
                start = end;
            }
        }
        Moves::Blocks { zero, blocks } => {
            if *zero {
                // SAFETY: the segment is as long as the range (3).
                unsafe { ptr::write_bytes(window.segment, 0, window.range.len()) };
            }
            for (source, block) in sources.iter().zip(blocks) {
                if block.run > 0 {
                    let Block { offset, run, loops } = block;
                    // SAFETY: the block's loops stay inside the leaf and the output (1, 2).
                    unsafe { window.write_block(source.address(), *offset, *run, loops) };
                }
            }
        }
    }
}

/// The part of an output that is written now.
struct Window {
    /// Where byte `range.start` goes; valid for `range.len()` bytes.
    segment: *mut u8,
    range: Range<usize>,
}

impl Window {
    /// Address of the output's byte `at`, which lies in the window.
    fn at(&self, at: usize) -> *mut u8 {
        self.segment.wrapping_add(at - self.range.start)
    }

    /// Writes what the window shows of `len` bytes at `at`.
    ///
    /// # Safety
    ///
    /// `len` bytes can be read at `source`, and `at..at + len` lies inside the output.
    unsafe fn write(&self, source: *const u8, at: usize, len: usize) {
        let start = at.max(self.range.start);
        let end = (at + len).min(self.range.end);
        if start < end {
            let from = source.wrapping_add(start - at);
            // SAFETY: `start..end` lies inside the bytes and inside the window, by the contract
            // above and the type's; nobody else writes there. Bytes have no alignment.
            unsafe { ptr::copy_nonoverlapping(from, self.at(start), end - start) };
        }
    }

    /// Writes what the window shows of a block whose first element goes to `at`.
    ///
    /// # Safety
    ///
    /// Every run that the loops reach from `source` can be read, and from `at` lies inside the
    /// output. Loops go outward to inward with falling output steps, each at least as large as
    /// what is inside it.
    unsafe fn write_block(&self, source: *const u8, at: usize, run: usize, loops: &[Loop]) {
        let extent = |loops: &[Loop]| {
            loops.iter().map(|step| (step.count - 1) * step.output_step).sum::<usize>() + run
        };
        let Range { start, end } = self.range;
        let whole = extent(loops);
        if at >= end || at + whole <= start {
            return;
        }
        if start <= at && at + whole <= end {
            // SAFETY: by the contract above; all of it is in the window.
            return unsafe { copy_block(run, loops, source, self.at(at)) };
        }
        let Some((outer, inner)) = loops.split_first() else {
            // SAFETY: a single run, by the contract above.
            return unsafe { self.write(source, at, run) };
        };
        // Steps that the window shows at all, and among them those that it shows whole.
        let Loop { count, source_step, output_step } = *outer;
        let part = extent(inner);
        let shown = if start < at + part { 0 } else { (start - at - part) / output_step + 1 }
            ..(end - at).div_ceil(output_step).min(count);
        let full = start.saturating_sub(at).div_ceil(output_step)..if end < at + part {
            0
        } else {
            ((end - at - part) / output_step + 1).min(count)
        };
        let place = |step: usize| {
            (source.wrapping_offset(source_step * step as isize), at + output_step * step)
        };
        let mut step = shown.start;
        while step < shown.end {
            let (from, to) = place(step);
            if full.contains(&step) {
                let mut many = loops.to_vec();
                many[0].count = full.end - step;
                // SAFETY: steps of the outer loop, by the contract above; the window shows all.
                unsafe { copy_block(run, &many, from, self.at(to)) };
                step = full.end;
            } else {
                // SAFETY: one step of the outer loop, by the contract above.
                unsafe { self.write_block(from, to, run, inner) };
                step += 1;
            }
        }
    }
}

/// # Safety
///
/// Every run that the loops reach from `source` can be read, and from `target` written.
unsafe fn copy_block(run: usize, loops: &[Loop], source: *const u8, target: *mut u8) {
    let Some((inner, outer)) = loops.split_last() else {
        // SAFETY: the block is a single run.
        return unsafe { ptr::copy_nonoverlapping(source, target, run) };
    };
    // An odometer over the outer loops, so that any rank needs no recursion.
    let mut at = vec![0_usize; outer.len()];
    let (mut source, mut target) = (source, target);
    loop {
        // SAFETY: the odometer stands on a position that the outer loops reach.
        unsafe { copy_runs(inner, run, source, target) };
        let mut d = outer.len();
        loop {
            if d == 0 {
                return;
            }
            d -= 1;
            let Loop { count, source_step, output_step } = outer[d];
            at[d] += 1;
            if at[d] < count {
                source = source.wrapping_offset(source_step);
                target = target.wrapping_add(output_step);
                break;
            }
            at[d] = 0;
            source = source.wrapping_offset(-source_step * (count as isize - 1));
            target = target.wrapping_sub(output_step * (count - 1));
        }
    }
}

/// # Safety
///
/// Every run of this loop can be read from `source` on, and written from `target` on.
unsafe fn copy_runs(inner: &Loop, run: usize, source: *const u8, target: *mut u8) {
    // Runs of one element are moved as integers: a call of memcpy would cost more than the move.
    match run {
        // SAFETY: passed on from the caller, here and below.
        1 => unsafe { copy_elements::<u8>(inner, source, target) },
        // SAFETY: as above.
        2 => unsafe { copy_elements::<u16>(inner, source, target) },
        // SAFETY: as above.
        4 => unsafe { copy_elements::<u32>(inner, source, target) },
        // SAFETY: as above.
        8 => unsafe { copy_elements::<u64>(inner, source, target) },
        _ => {
            for step in 0..inner.count {
                let from = source.wrapping_offset(inner.source_step * step as isize);
                let to = target.wrapping_add(inner.output_step * step);
                // SAFETY: step `step` of the loop; by the contract above.
                unsafe { ptr::copy_nonoverlapping(from, to, run) };
            }
        }
    }
}

/// # Safety
///
/// As [`copy_runs`], with runs of `size_of::<T>()` bytes; no alignment is asked for.
unsafe fn copy_elements<T: Copy>(inner: &Loop, source: *const u8, target: *mut u8) {
    for step in 0..inner.count {
        let from = source.wrapping_offset(inner.source_step * step as isize);
        // SAFETY: step `step` of the loop, readable by the contract above.
        let element = unsafe { from.cast::<T>().read_unaligned() };
        let to = target.wrapping_add(inner.output_step * step);
        // SAFETY: step `step` of the loop, writable by the contract above.
        unsafe { to.cast::<T>().write_unaligned(element) };
    }
}
