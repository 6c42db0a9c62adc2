//! The arena's books for Python, which owns the slots' memory.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::arena::{self, ArenaError, Lease};

/// Slots of one size: which is free, leased, or read by a device. See `rust/src/arena.rs`.
#[pyclass(frozen, module = "mmcollate._core")]
pub(super) struct Arena {
    books: arena::Arena,
}

/// A lease as Python holds it: slot and generation.
type Pair = (usize, u64);

fn pair(lease: Lease) -> Pair {
    (lease.slot, lease.generation)
}

fn lease((slot, generation): Pair) -> Lease {
    Lease { slot, generation }
}

fn raised(error: ArenaError) -> PyErr {
    PyRuntimeError::new_err(format!("mmcollate: {error}"))
}

#[pymethods]
impl Arena {
    #[new]
    fn new(slot_bytes: usize, cap: usize) -> Self {
        Self { books: arena::Arena::new(slot_bytes, cap) }
    }

    /// Takes a free slot, or says that there is none.
    fn lease(&self) -> Option<Pair> {
        self.books.lease().map(pair)
    }

    /// Takes a place for a new slot, if the cap has room; `settled` must follow.
    fn grow(&self) -> Option<Pair> {
        self.books.grow().map(pair)
    }

    /// Whether the place that grew has memory now: it is then leased, else given back.
    fn settled(&self, taken: Pair, has_memory: bool) -> PyResult<()> {
        self.books.settled(lease(taken), has_memory).map_err(raised)
    }

    /// A device is about to read the slot.
    fn launch(&self, taken: Pair) -> PyResult<()> {
        self.books.launch(lease(taken)).map_err(raised)
    }

    /// Gives the slot back; one that was launched must have passed its fence.
    fn release(&self, taken: Pair) -> PyResult<()> {
        self.books.release(lease(taken)).map_err(raised)
    }

    /// Takes a leased slot out of use: its memory may go.
    fn retire(&self, taken: Pair) -> PyResult<()> {
        self.books.retire(lease(taken)).map_err(raised)
    }

    /// How many slots are growing, free, leased and in flight.
    fn census(&self) -> (usize, usize, usize, usize) {
        let census = self.books.census();
        (census.growing, census.free, census.leased, census.in_flight)
    }

    #[getter]
    fn slot_bytes(&self) -> usize {
        self.books.slot_bytes()
    }

    /// Most slots that there can be.
    #[getter]
    fn capacity(&self) -> usize {
        self.books.capacity()
    }
}
