//! The only copy.

use std::ptr;

use crate::plan::{Block, Loop, Moves, Output};
use crate::source::SourcePtr;

/// Address of a segment's first byte.
#[derive(Clone, Copy, Debug)]
pub struct SegmentPtr(*mut u8);

// SAFETY: an address; `gather`'s caller promises that it can be written to wherever it runs.
unsafe impl Send for SegmentPtr {}

impl SegmentPtr {
    /// An address to gather to. Making one promises nothing yet.
    pub fn new(address: *mut u8) -> Self {
        Self(address)
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
    let segment = segment.0;
    match &output.moves {
        Moves::Rows { len: 0 } => {}
        Moves::Rows { len } => {
            for (row, source) in sources.iter().enumerate() {
                // SAFETY: the plan made the output `sources.len() * len` bytes (1), so the row
                // lies inside the segment (3).
                let target = unsafe { segment.add(row * len) };
                // SAFETY: the leaf holds `len` bytes (1, 2); the row is ours alone (3).
                unsafe { copy(*source, target, *len) };
            }
        }
        Moves::Runs(lens) => {
            let mut offset = 0;
            for (source, &len) in sources.iter().zip(lens) {
                // SAFETY: the runs add up to `output.nbytes` (1), so this one lies inside (3).
                let target = unsafe { segment.add(offset) };
                // SAFETY: the leaf holds `len` bytes (1, 2); the run is ours alone (3).
                unsafe { copy(*source, target, len) };
                offset += len;
            }
        }
        Moves::Blocks { zero, blocks } => {
            if *zero {
                // SAFETY: the segment is `output.nbytes` long (3).
                unsafe { ptr::write_bytes(segment, 0, output.nbytes) };
            }
            for (source, block) in sources.iter().zip(blocks) {
                if block.run > 0 {
                    // SAFETY: a block of a leaf with elements starts inside the output (1, 3).
                    let target = unsafe { segment.add(block.offset) };
                    // SAFETY: the block's loops stay inside the leaf and the output (1, 2, 3).
                    unsafe { copy_block(block, source.address(), target) };
                }
            }
        }
    }
}

/// # Safety
///
/// `len` bytes can be read at `source` and written at `target`; they do not overlap.
unsafe fn copy(source: SourcePtr, target: *mut u8, len: usize) {
    if len > 0 {
        // SAFETY: by the contract above; bytes have no alignment.
        unsafe { ptr::copy_nonoverlapping(source.address(), target, len) };
    }
}

/// # Safety
///
/// Every run that the block's loops reach from `source` can be read, and from `target` written.
unsafe fn copy_block(block: &Block, source: *const u8, target: *mut u8) {
    let Some((inner, outer)) = block.loops.split_last() else {
        // SAFETY: the block is a single run.
        return unsafe { ptr::copy_nonoverlapping(source, target, block.run) };
    };
    // An odometer over the outer loops, so that any rank needs no recursion.
    let mut at = vec![0_usize; outer.len()];
    let (mut source, mut target) = (source, target);
    loop {
        // SAFETY: the odometer stands on a position that the outer loops reach.
        unsafe { copy_runs(inner, block.run, source, target) };
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
