//! Where a segment may start.

use crate::error::PlanError;

/// Every segment starts at a multiple of this many bytes.
///
/// 256 covers what readers of a segment ask for: a cache line and AVX-512 (64), 16-byte vector
/// loads of CUDA kernels and Triton's pointer specialisation, and the 256 bytes `cudaMalloc`
/// guarantees. A device allocation carved at these offsets is therefore as aligned as a fresh one.
pub const SEGMENT_ALIGN: usize = 256;

const _: () = assert!(SEGMENT_ALIGN.is_power_of_two());

/// Rounds `offset` up to the next multiple of [`SEGMENT_ALIGN`].
pub fn align_up(offset: usize) -> Result<usize, PlanError> {
    offset
        .checked_add(SEGMENT_ALIGN - 1)
        .map(|end| end & !(SEGMENT_ALIGN - 1))
        .ok_or(PlanError::TooLarge)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_up_to_the_next_multiple() {
        for (offset, aligned) in [(0, 0), (1, 256), (255, 256), (256, 256), (257, 512)] {
            assert_eq!(align_up(offset), Ok(aligned));
        }
    }

    #[test]
    fn an_offset_near_the_end_of_memory_is_an_error() {
        assert_eq!(align_up(usize::MAX - 100), Err(PlanError::TooLarge));
    }
}
