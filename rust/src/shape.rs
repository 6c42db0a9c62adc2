//! Sizes and strides, with arithmetic that can't overflow.
//!
//! Sizes and strides are counted in elements, as in torch and DLPack.

use smallvec::SmallVec;

use crate::error::PlanError;

/// Sizes or strides of one tensor; up to six dimensions need no allocation.
pub type Dims = SmallVec<[i64; 6]>;

/// Number of elements, or an error if it is negative or does not fit.
pub fn element_count(sizes: &[i64]) -> Result<usize, PlanError> {
    let mut count: usize = 1;
    for &size in sizes {
        let size = usize::try_from(size).map_err(|_| PlanError::TooLarge)?;
        count = count.checked_mul(size).ok_or(PlanError::TooLarge)?;
    }
    Ok(count)
}

/// Number of bytes of a dense tensor, at most `isize::MAX` (what an allocation can hold).
pub fn byte_count(sizes: &[i64], item_size: usize) -> Result<usize, PlanError> {
    element_count(sizes)?
        .checked_mul(item_size)
        .filter(|&bytes| isize::try_from(bytes).is_ok())
        .ok_or(PlanError::TooLarge)
}

/// The strides torch gives a fresh tensor: C order, a size of zero counted as one.
pub fn contiguous_strides(sizes: &[i64]) -> Result<Dims, PlanError> {
    let mut strides = Dims::from_elem(1, sizes.len());
    for d in (1..sizes.len()).rev() {
        strides[d - 1] = strides[d].checked_mul(sizes[d].max(1)).ok_or(PlanError::TooLarge)?;
    }
    Ok(strides)
}

/// Whether the elements lie in C order without gaps. A dimension of size 1 may carry any stride,
/// and a tensor without elements is contiguous.
pub fn is_contiguous(sizes: &[i64], strides: &[i64]) -> bool {
    if sizes.contains(&0) {
        return true;
    }
    let mut expected: i64 = 1;
    for (&size, &stride) in sizes.iter().zip(strides).rev() {
        if size != 1 {
            if stride != expected {
                return false;
            }
            // Saturation only meets sizes that no memory holds; they then compare unequal.
            expected = expected.saturating_mul(size);
        }
    }
    true
}

/// Whether a dimension of more than one element has stride 0: the tensor declares more than it
/// holds.
pub fn is_expanded(sizes: &[i64], strides: &[i64]) -> bool {
    sizes.iter().zip(strides).any(|(&size, &stride)| size > 1 && stride == 0)
}

/// The dimension that `dim` (negative ones count from the end) names among `rank` dimensions.
pub fn resolve_dim(dim: i64, rank: usize) -> Result<usize, PlanError> {
    let signed_rank = i64::try_from(rank).map_err(|_| PlanError::TooLarge)?;
    let resolved = if dim < 0 { dim.saturating_add(signed_rank) } else { dim };
    usize::try_from(resolved).ok().filter(|&d| d < rank).ok_or(PlanError::DimOutOfRange)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_checked() {
        assert_eq!(element_count(&[]), Ok(1));
        assert_eq!(element_count(&[3, 0, 5]), Ok(0));
        assert_eq!(element_count(&[1 << 33]), Ok(1 << 33));
        assert_eq!(element_count(&[1 << 40, 1 << 40]), Err(PlanError::TooLarge));
        assert_eq!(element_count(&[-1]), Err(PlanError::TooLarge));
        assert_eq!(byte_count(&[1 << 61], 4), Err(PlanError::TooLarge));
        assert_eq!(byte_count(&[1 << 60], 8), Err(PlanError::TooLarge));
        assert_eq!(byte_count(&[1 << 31, 2], 8), Ok(1 << 35));
    }

    #[test]
    fn contiguity_ignores_dimensions_of_size_one() {
        assert!(is_contiguous(&[2, 1, 3], &[3, 77, 1]));
        assert!(is_contiguous(&[], &[]));
        assert!(is_contiguous(&[0, 3], &[9, 9]));
        assert!(is_contiguous(&[3, 0], &[9, 9]));
        assert!(!is_contiguous(&[2, 3], &[1, 2]));
        assert!(!is_contiguous(&[2, 3], &[4, 1]));
        assert!(!is_contiguous(&[2], &[0]));
    }

    #[test]
    fn strides_of_a_fresh_tensor_count_zero_sizes_as_one() {
        assert_eq!(contiguous_strides(&[2, 0, 3]).unwrap().as_slice(), &[3, 3, 1]);
        assert_eq!(contiguous_strides(&[]).unwrap().as_slice(), &[] as &[i64]);
        assert_eq!(contiguous_strides(&[4, 5, 6]).unwrap().as_slice(), &[30, 6, 1]);
    }

    #[test]
    fn a_dim_counts_from_either_end() {
        assert_eq!(resolve_dim(-1, 3), Ok(2));
        assert_eq!(resolve_dim(0, 1), Ok(0));
        for (dim, rank) in [(3, 3), (-4, 3), (0, 0), (i64::MIN, 2)] {
            assert_eq!(resolve_dim(dim, rank), Err(PlanError::DimOutOfRange));
        }
    }
}
