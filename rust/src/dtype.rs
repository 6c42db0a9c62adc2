//! Element types as DLPack writes them: `(code, bits, lanes)`.

/// An element type. The core moves elements and never reads one, so their size is all it needs.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DType {
    /// The type's family, `DLDataTypeCode`.
    pub code: u8,
    /// Bits of one lane.
    pub bits: u8,
    /// Lanes packed into one element; 1 but for sub-byte types.
    pub lanes: u16,
}

/// `DLDataTypeCode` values, from DLPack 1.3 (`dlpack.h`).
#[allow(missing_docs)]
pub mod code {
    pub const INT: u8 = 0;
    pub const UINT: u8 = 1;
    pub const FLOAT: u8 = 2;
    pub const BFLOAT: u8 = 4;
    pub const COMPLEX: u8 = 5;
    pub const BOOL: u8 = 6;
    pub const FLOAT8_E4M3FN: u8 = 10;
    pub const FLOAT8_E4M3FNUZ: u8 = 11;
    pub const FLOAT8_E5M2: u8 = 12;
    pub const FLOAT8_E5M2FNUZ: u8 = 13;
}

impl DType {
    /// An element type of one lane.
    pub const fn new(code: u8, bits: u8) -> Self {
        Self { code, bits, lanes: 1 }
    }

    /// Bytes of one element if the fast path takes this type, else `None`.
    ///
    /// Taken are the types that torch itself can stack, concatenate and fill with zeros on a CPU.
    /// Left to the reference: complex numbers (a conjugated view shows raw bytes through DLPack)
    /// and packed or exotic types, where torch raises or may start to.
    pub const fn item_size(self) -> Option<usize> {
        if self.lanes != 1 {
            return None;
        }
        match (self.code, self.bits) {
            (code::BOOL, 8) => Some(1),
            (code::INT | code::UINT, 8 | 16 | 32 | 64) => Some(self.bits as usize / 8),
            (code::FLOAT, 16 | 32 | 64) => Some(self.bits as usize / 8),
            (code::BFLOAT, 16) => Some(2),
            (code::FLOAT8_E4M3FN..=code::FLOAT8_E5M2FNUZ, 8) => Some(1),
            _ => None,
        }
    }

    /// Whether torch's 1..7-bit shell types look like this one through DLPack (all of them arrive
    /// as 8 bits), so that only the tensor's own `dtype` tells them apart.
    pub const fn may_hide_shell_dtype(self) -> bool {
        matches!((self.code, self.bits), (code::INT | code::UINT, 8))
    }

    /// Whether tensors of this type can require a gradient, or carry a lazy negation.
    pub const fn is_floating(self) -> bool {
        matches!(
            self.code,
            code::FLOAT | code::BFLOAT | code::FLOAT8_E4M3FN..=code::FLOAT8_E5M2FNUZ
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_types_torch_can_batch() {
        let sizes = [
            (DType::new(code::BOOL, 8), Some(1)),
            (DType::new(code::INT, 64), Some(8)),
            (DType::new(code::UINT, 16), Some(2)),
            (DType::new(code::FLOAT, 32), Some(4)),
            (DType::new(code::BFLOAT, 16), Some(2)),
            (DType::new(code::FLOAT8_E5M2, 8), Some(1)),
            (DType::new(code::COMPLEX, 64), None),
            (DType::new(14, 8), None),
            (DType { code: 17, bits: 4, lanes: 2 }, None),
            (DType { code: code::FLOAT, bits: 32, lanes: 4 }, None),
        ];
        for (dtype, size) in sizes {
            assert_eq!(dtype.item_size(), size, "{dtype:?}");
        }
    }
}
