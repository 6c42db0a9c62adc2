//! Borrowed leaves: where their bytes lie and how they are laid out.
//!
//! # Liveness
//!
//! A [`SourcePtr`] is an address, not a reference: tensors may be written to by other threads, so
//! no Rust reference to their bytes ever exists. Whoever makes one promises that its bytes stay
//! allocated until the last gather that reads it has returned. At the Python boundary this holds
//! because the batch owns a reference to every leaf for the whole call. What no collator can rule
//! out, torch's own operators included, is another thread that resizes a leaf (`resize_`, `set_`)
//! while a gather runs without the interpreter lock.

use crate::dtype::DType;
use crate::shape::{self, Dims};

/// Address of a leaf's first element. Dangling only for a leaf without elements.
#[derive(Clone, Copy, Debug)]
pub struct SourcePtr(*const u8);

// SAFETY: the address is only dereferenced by `gather`, whose caller promises that the bytes are
// alive on whatever thread it runs.
unsafe impl Send for SourcePtr {}
// SAFETY: as above; reading through a shared address needs nothing more.
unsafe impl Sync for SourcePtr {}

impl SourcePtr {
    /// # Safety
    ///
    /// The bytes that the leaf's layout spans from `address` on stay allocated and readable until
    /// the last gather that uses this pointer has returned. A leaf without elements may have any
    /// address.
    pub unsafe fn new(address: *const u8) -> Self {
        Self(address)
    }

    /// The address itself.
    pub fn address(self) -> *const u8 {
        self.0
    }

    /// Whether every byte is 0 or 1, as those of bools are unless they were made from other bytes.
    ///
    /// # Safety
    ///
    /// The leaf is contiguous and holds `len` bytes.
    pub unsafe fn holds_plain_bools(self, len: usize) -> bool {
        let mut seen: u64 = 0;
        let words = len / size_of::<u64>();
        for word in 0..words {
            let at = self.0.wrapping_add(word * size_of::<u64>()).cast::<u64>();
            // SAFETY: these 8 bytes are among the leaf's; no alignment is asked for.
            seen |= unsafe { at.read_unaligned() };
        }
        for byte in words * size_of::<u64>()..len {
            // SAFETY: this byte is among the leaf's.
            seen |= u64::from(unsafe { self.0.wrapping_add(byte).read() });
        }
        seen & 0xfefe_fefe_fefe_fefe == 0
    }

    /// Whether two leaves hold the same bytes.
    ///
    /// # Safety
    ///
    /// Both are contiguous, hold `len` bytes, and no other thread writes to them meanwhile.
    pub unsafe fn same_bytes(self, other: Self, len: usize) -> bool {
        // SAFETY: by the contract above; without elements the address may dangle, so it is not
        // looked at.
        len == 0 || unsafe { libc::memcmp(self.0.cast(), other.0.cast(), len) } == 0
    }
}

/// Layouts of the leaves of one field, all of one dtype.
///
/// Metadata batches have hundreds of equal leaves, so sizes are stored once until a leaf differs,
/// and strides only for leaves that are not contiguous.
#[derive(Clone, Debug)]
pub struct Layouts {
    dtype: DType,
    item_size: usize,
    count: usize,
    rank: usize,
    /// `rank` sizes if all leaves are alike, else `rank` for each leaf.
    sizes: Dims,
    uniform: bool,
    mixed_ranks: bool,
    strided: Vec<(usize, Dims)>,
    expanded: bool,
}

impl Layouts {
    /// The first leaf's layout. `dtype` must be one that [`DType::item_size`] knows; `item_size`
    /// is what it said.
    pub fn new(dtype: DType, item_size: usize, sizes: &[i64], strides: &[i64]) -> Self {
        let mut layouts = Self {
            dtype,
            item_size,
            count: 1,
            rank: sizes.len(),
            sizes: Dims::from_slice(sizes),
            uniform: true,
            mixed_ranks: false,
            strided: Vec::new(),
            expanded: false,
        };
        layouts.note_strides(0, sizes, strides);
        layouts
    }

    /// Adds the next leaf's layout.
    pub fn push(&mut self, sizes: &[i64], strides: &[i64]) {
        let leaf = self.count;
        self.count += 1;
        if sizes.len() != self.rank {
            self.mixed_ranks = true;
        }
        if self.mixed_ranks {
            return;
        }
        if self.uniform {
            if sizes != self.sizes.as_slice() {
                self.uniform = false;
                self.sizes = Dims::from_vec(self.sizes.repeat(leaf));
                self.sizes.extend_from_slice(sizes);
            }
        } else {
            self.sizes.extend_from_slice(sizes);
        }
        self.note_strides(leaf, sizes, strides);
    }

    /// Adds a leaf with the sizes that all have had so far, and the strides of the first, which is
    /// contiguous; returns whether it is such a leaf.
    pub fn push_alike(&mut self, sizes: &[i64], strides: &[i64], first_strides: &[i64]) -> bool {
        let alike = self.uniform() && same(sizes, &self.sizes) && same(strides, first_strides);
        self.count += usize::from(alike);
        alike
    }

    fn note_strides(&mut self, leaf: usize, sizes: &[i64], strides: &[i64]) {
        if !shape::is_contiguous(sizes, strides) {
            self.expanded |= shape::is_expanded(sizes, strides);
            self.strided.push((leaf, Dims::from_slice(strides)));
        }
    }

    /// The element type of all leaves.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes of one element.
    pub fn item_size(&self) -> usize {
        self.item_size
    }

    /// Number of leaves; at least one.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Number of dimensions of each leaf; of the first if they differ.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Whether leaves differ in their number of dimensions; sizes are then unknown.
    pub fn mixed_ranks(&self) -> bool {
        self.mixed_ranks
    }

    /// Whether all leaves have the same sizes.
    pub fn uniform(&self) -> bool {
        self.uniform && !self.mixed_ranks
    }

    /// Whether a leaf has a stride of 0 over more than one element.
    pub fn expanded(&self) -> bool {
        self.expanded
    }

    /// Whether every leaf is contiguous.
    pub fn all_contiguous(&self) -> bool {
        self.strided.is_empty()
    }

    /// Sizes of one leaf. Not to be asked for when ranks are mixed.
    pub fn sizes(&self, leaf: usize) -> &[i64] {
        let start = if self.uniform { 0 } else { leaf * self.rank };
        &self.sizes[start..start + self.rank]
    }

    /// Strides of one leaf, `None` if it is contiguous.
    pub fn strides(&self, leaf: usize) -> Option<&[i64]> {
        let at = self.strided.binary_search_by_key(&leaf, |&(strided, _)| strided).ok()?;
        Some(&self.strided[at].1)
    }
}

/// `left == right`, without a call of the C library's for three numbers.
fn same(left: &[i64], right: &[i64]) -> bool {
    left.len() == right.len() && left.iter().zip(right).all(|(left, right)| left == right)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::code;

    const F32: DType = DType::new(code::FLOAT, 32);

    #[test]
    fn sizes_are_stored_once_until_a_leaf_differs() {
        let mut layouts = Layouts::new(F32, 4, &[2, 3], &[3, 1]);
        layouts.push(&[2, 3], &[3, 1]);
        assert!(layouts.uniform());
        assert_eq!(layouts.sizes(1), &[2, 3]);
        layouts.push(&[5, 3], &[3, 1]);
        assert!(!layouts.uniform());
        let sizes: Vec<_> = (0..3).map(|leaf| layouts.sizes(leaf).to_vec()).collect();
        assert_eq!(sizes, [[2, 3], [2, 3], [5, 3]]);
    }

    #[test]
    fn a_leaf_is_alike_with_the_same_sizes_and_strides() {
        let mut layouts = Layouts::new(F32, 4, &[2, 3], &[3, 1]);
        assert!(layouts.push_alike(&[2, 3], &[3, 1], &[3, 1]));
        assert!(!layouts.push_alike(&[2, 4], &[4, 1], &[3, 1]));
        assert!(!layouts.push_alike(&[2, 3], &[1, 2], &[3, 1]));
        assert!(!layouts.push_alike(&[2], &[1], &[3, 1]));
        assert_eq!(layouts.len(), 2);
        layouts.push(&[2, 4], &[4, 1]);
        assert!(!layouts.push_alike(&[2, 3], &[3, 1], &[3, 1]));
        assert_eq!(layouts.len(), 3);
    }

    #[test]
    fn plain_bools_are_zeros_and_ones() {
        for len in 0..40 {
            let mut bytes: Vec<u8> = (0..len).map(|i| i % 2).collect();
            let plain = |bytes: &[u8]| {
                // SAFETY: the bytes outlive the pointer.
                let source = unsafe { SourcePtr::new(bytes.as_ptr()) };
                // SAFETY: the bytes are there.
                unsafe { source.holds_plain_bools(bytes.len()) }
            };
            assert!(plain(&bytes));
            for at in 0..bytes.len() {
                for odd in [2, 3, 128, 255] {
                    let byte = std::mem::replace(&mut bytes[at], odd);
                    assert!(!plain(&bytes), "{odd} at {at} of {len}");
                    bytes[at] = byte;
                }
            }
        }
    }

    #[test]
    fn only_leaves_with_gaps_have_strides() {
        let mut layouts = Layouts::new(F32, 4, &[2, 3], &[3, 1]);
        layouts.push(&[2, 3], &[1, 2]);
        layouts.push(&[2, 3], &[3, 1]);
        assert_eq!(layouts.strides(0), None);
        assert_eq!(layouts.strides(1), Some(&[1, 2][..]));
        assert!(!layouts.all_contiguous());
        assert!(!layouts.expanded());
        layouts.push(&[2, 3], &[0, 1]);
        assert!(layouts.expanded());
    }

    #[test]
    fn scalars_have_no_sizes() {
        let mut layouts = Layouts::new(F32, 4, &[], &[]);
        layouts.push(&[], &[]);
        assert!(layouts.uniform());
        assert_eq!(layouts.sizes(1), &[] as &[i64]);
        layouts.push(&[1], &[1]);
        assert!(layouts.mixed_ranks());
    }
}
