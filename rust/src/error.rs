//! What can go wrong while planning.
//!
//! None of these reaches a user as it is: the Python boundary answers each by handing the field to
//! the reference, whose exception is then torch's own. The text is what `explain` prints.

use thiserror::Error;

/// Why a field can't be planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PlanError {
    /// A size or an offset does not fit into 64 bits, or is negative.
    #[error("sizes do not fit into 64 bits")]
    TooLarge,
    /// The concat dimension is not one of the leaves' dimensions.
    #[error("the concat dimension is out of range")]
    DimOutOfRange,
    /// Leaves of one field have different numbers of dimensions.
    #[error("leaves have different ranks")]
    RankMismatch,
    /// A leaf repeats its elements through a stride of zero; what it declares may be far larger
    /// than what it holds.
    #[error("an expanded leaf (stride 0)")]
    Expanded,
}
