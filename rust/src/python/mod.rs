//! Everything that knows Python: the module `mmcollate._core`.

mod arena;
mod buffer;
mod collator;
mod device;
mod exchange;
mod guard;
mod items;
mod reason;
mod values;

use std::sync::atomic::Ordering;

use pyo3::prelude::*;
use pyo3::types::PyDict;

use reason::{COUNTERS, Reason, read};

use crate::memory::WARM;
use crate::pool;

/// Sums since the process started, or since `reset_stats`.
#[pyfunction]
fn stats(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let fields = PyDict::new(py);
    let references = PyDict::new(py);
    let mut reference = 0;
    for &reason in Reason::ALL {
        let count = read(&COUNTERS.reference[reason as usize]);
        reference += count;
        if count > 0 {
            references.set_item(reason.name(), count)?;
        }
    }
    fields.set_item("alias", read(&COUNTERS.alias))?;
    fields.set_item("view", read(&COUNTERS.view))?;
    fields.set_item("list", read(&COUNTERS.list))?;
    fields.set_item("gather", read(&COUNTERS.gather))?;
    fields.set_item("stage", read(&COUNTERS.stage))?;
    fields.set_item("reference", reference)?;
    let stats = PyDict::new(py);
    stats.set_item("batches", read(&COUNTERS.batches))?;
    stats.set_item("items", read(&COUNTERS.items))?;
    stats.set_item("fields", fields)?;
    stats.set_item("reference_reasons", references)?;
    stats.set_item("bytes_gathered", read(&COUNTERS.bytes_gathered))?;
    stats.set_item("detached_gathers", read(&COUNTERS.detached_gathers))?;
    stats.set_item("detached_peak", COUNTERS.detached_peak.load(Ordering::Relaxed))?;
    stats.set_item("shared_pieces", read(&COUNTERS.shared_pieces))?;
    stats.set_item("warm_pool_bytes", WARM.nbytes())?;
    Ok(stats)
}

/// All sums back to zero.
#[pyfunction]
fn reset_stats() {
    COUNTERS.reset();
}

/// The most bytes that wait in the warm pool from now on; 0 turns it off.
#[pyfunction]
fn set_warm_max(py: Python<'_>, nbytes: usize) {
    py.detach(|| WARM.set_cap(nbytes));
}

/// How many threads may work on one copy from now on, the caller included.
#[pyfunction]
fn set_threads(threads: usize) {
    pool::set_threads(threads);
}

/// Gives the memory in the warm pool back; returns how many bytes.
#[pyfunction]
fn trim_warm(py: Python<'_>) -> usize {
    py.detach(|| WARM.trim())
}

/// The module `mmcollate._core`.
#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("COPY_UP_TO", buffer::COPY_UP_TO)?;
    module.add_class::<collator::Collator>()?;
    module.add_class::<arena::Arena>()?;
    module.add_class::<device::DevicePlan>()?;
    module.add_function(wrap_pyfunction!(stats, module)?)?;
    module.add_function(wrap_pyfunction!(reset_stats, module)?)?;
    module.add_function(wrap_pyfunction!(set_warm_max, module)?)?;
    module.add_function(wrap_pyfunction!(set_threads, module)?)?;
    module.add_function(wrap_pyfunction!(trim_warm, module)?)?;
    Ok(())
}
