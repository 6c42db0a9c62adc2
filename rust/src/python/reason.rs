//! Why a field took the reference, and the counters that tell.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::error::PlanError;

macro_rules! reasons {
    ($($(#[$doc:meta])* $variant:ident => $name:literal,)+) => {
        /// Why a field's batch was left to the reference.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum Reason { $($(#[$doc])* $variant,)+ }

        impl Reason {
            /// All of them, in the order of their counters.
            pub(super) const ALL: &'static [Reason] = &[$(Reason::$variant,)+];

            /// The name under which `stats()` counts it.
            pub(super) const fn name(self) -> &'static str {
                match self { $(Reason::$variant => $name,)+ }
            }
        }
    };
}

reasons! {
    /// The batch goes to a device; torch copies it there.
    DeviceTarget => "device_target",
    /// Too little goes to the device to be worth staging.
    Small => "small",
    /// A single leaf that lies in pinned memory already: torch copies it from there.
    PinnedLeaf => "pinned_leaf",
    /// Every slot of the arena is in use, and none became free in time.
    NoSlot => "no_slot",
    /// The stream is capturing.
    Capturing => "capturing",
    /// A leaf was changed between planning and gathering.
    Changed => "changed",
    /// The result was asked for in pinned memory.
    Pinned => "pinned",
    /// `pin_memory` is no bool, which torch refuses where it gets to see it.
    PinType => "pin_memory_type",
    /// The item is no plain mapping, or an element no plain element.
    ItemClass => "item_class",
    /// The field's class is none of the three kinds, or its `keep_on_cpu` no bool.
    FieldClass => "field_class",
    /// The items disagree about the field's kind.
    MixedKinds => "mixed_kinds",
    /// Tensors and other values in one field.
    MixedLeaves => "mixed_leaves",
    /// A value that is neither a plain tensor, nor a plain scalar, nor a list where one may be.
    NotATensor => "not_a_tensor",
    /// Lists of tensors that may have to move, or of unknown values.
    Nested => "nested",
    /// A tensor on another device.
    NotOnCpu => "not_on_cpu",
    /// Sparse, quantized, meta, fake …: no plain data to read.
    NoPlainData => "no_plain_data",
    /// Complex, packed or exotic element types.
    Dtype => "dtype",
    /// Leaves of different element types; torch casts them.
    MixedDtypes => "mixed_dtypes",
    /// A gradient is asked for.
    RequiresGrad => "requires_grad",
    /// The negative bit is set: the bytes are not the values.
    Negated => "negated",
    /// An expanded leaf (stride 0).
    Expanded => "expanded",
    /// Flat leaves of different ranks.
    RankMismatch => "rank_mismatch",
    /// The concat dimension is out of range, no plain integer, or not 0 for lists.
    Dim => "dim",
    /// More than 64 bits can say.
    TooLarge => "too_large",
    /// No memory for the batch; torch's attempt raises its own error.
    NoMemory => "no_memory",
    /// Leaves that lie side by side, but a view over them would not be what a copy is.
    SideBySide => "side_by_side",
    /// A mode is active that wants to see torch's operations.
    TorchMode => "torch_mode",
}

impl From<PlanError> for Reason {
    fn from(error: PlanError) -> Self {
        match error {
            PlanError::TooLarge => Reason::TooLarge,
            PlanError::DimOutOfRange => Reason::Dim,
            PlanError::RankMismatch => Reason::RankMismatch,
            PlanError::Expanded => Reason::Expanded,
        }
    }
}

/// Counters of this process. Relaxed: each is a sum of its own, read for reports.
pub(super) struct Counters {
    pub(super) batches: AtomicU64,
    pub(super) items: AtomicU64,
    pub(super) alias: AtomicU64,
    pub(super) view: AtomicU64,
    pub(super) list: AtomicU64,
    pub(super) gather: AtomicU64,
    pub(super) stage: AtomicU64,
    pub(super) bytes_gathered: AtomicU64,
    pub(super) detached_gathers: AtomicU64,
    pub(super) detached_peak: AtomicUsize,
    pub(super) shared_pieces: AtomicU64,
    pub(super) reference: [AtomicU64; Reason::ALL.len()],
}

/// What `stats()` tells.
pub(super) static COUNTERS: Counters = Counters::new();

/// Where collators count that nobody is to hear of: those of a check.
pub(super) static UNHEARD: Counters = Counters::new();

impl Counters {
    const fn new() -> Self {
        Self {
            batches: AtomicU64::new(0),
            items: AtomicU64::new(0),
            alias: AtomicU64::new(0),
            view: AtomicU64::new(0),
            list: AtomicU64::new(0),
            gather: AtomicU64::new(0),
            stage: AtomicU64::new(0),
            bytes_gathered: AtomicU64::new(0),
            detached_gathers: AtomicU64::new(0),
            detached_peak: AtomicUsize::new(0),
            shared_pieces: AtomicU64::new(0),
            reference: [const { AtomicU64::new(0) }; Reason::ALL.len()],
        }
    }

    /// Counts one field that took the reference.
    pub(super) fn count_reference(&self, reason: Reason) {
        add(&self.reference[reason as usize], 1);
    }

    /// All sums back to zero.
    pub(super) fn reset(&self) {
        let sums = [
            &self.batches,
            &self.items,
            &self.alias,
            &self.view,
            &self.list,
            &self.gather,
            &self.stage,
            &self.bytes_gathered,
            &self.detached_gathers,
            &self.shared_pieces,
        ];
        for sum in sums.into_iter().chain(&self.reference) {
            sum.store(0, Ordering::Relaxed);
        }
        self.detached_peak.store(0, Ordering::Relaxed);
    }
}

/// Adds to one sum.
pub(super) fn add(sum: &AtomicU64, by: u64) {
    sum.fetch_add(by, Ordering::Relaxed);
}

/// Reads one sum.
pub(super) fn read(sum: &AtomicU64) -> u64 {
    sum.load(Ordering::Relaxed)
}
