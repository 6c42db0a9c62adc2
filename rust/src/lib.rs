//! The core of mmcollate: from borrowed leaves to a plan, from a plan to bytes.
//!
//! One direction, no step calls back into an earlier one:
//!
//! ```text
//! leaves -> source (where the bytes lie) -> plan (where they go; pure) -> gather (the only copy)
//! ```
//!
//! Everything outside [`python`] builds and is tested without Python and without torch.

pub mod align;
pub mod arena;
pub mod dlpack;
pub mod dtype;
pub mod error;
pub mod gather;
pub mod memory;
pub mod plan;
pub mod pool;
pub mod shape;
pub mod source;

#[cfg(feature = "python")]
mod python;
