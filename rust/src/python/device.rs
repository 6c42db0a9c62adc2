//! What is bound for a device: planned and gathered here, allocated and copied by the caller.
//!
//! A [`DevicePlan`] holds the leaves themselves and no address: between planning and gathering any
//! Python code may run, so each gather reads its leaves anew and refuses any that is not as it was.

use std::ops::Range;

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use super::buffer::DETACH_FROM;
use super::collator::Collator;
use super::exchange::Borrowed;
use super::items::{Column, Table};
use super::reason::{Reason, add};
use crate::dtype::{DType, code};
use crate::gather::{self, SegmentPtr};
use crate::plan::{self, Demand, Layout, Output};
use crate::shape;
use crate::source::{Layouts, SourcePtr};

/// One tensor on the device: the leaves that it is gathered from, and how.
pub(super) struct Load {
    pub(super) output: Output,
    pub(super) layouts: Layouts,
    pub(super) leaves: Vec<Py<PyAny>>,
    /// Where in the field's batch it belongs; `None` if it is the batch.
    pub(super) home: Option<(Py<PyList>, usize)>,
}

/// What a field becomes on the device.
pub(super) struct Loads {
    /// The field's batch if that is a list: `None` where the loads belong.
    pub(super) list: Option<Py<PyAny>>,
    pub(super) loads: Vec<Load>,
}

/// A field of the batch, with what the reference needs to make it instead.
pub(super) struct BoundField {
    key: Py<PyAny>,
    field: Py<PyAny>,
    column: Py<PyList>,
    loads: Range<usize>,
}

/// The fields of one batch that go to a device.
#[pyclass(module = "mmcollate._core")]
pub(super) struct DevicePlan {
    pub(super) collator: Py<Collator>,
    pub(super) device: Py<PyAny>,
    pub(super) pin_memory: Py<PyAny>,
    pub(super) context: Py<PyAny>,
    pub(super) fields: Vec<BoundField>,
    pub(super) loads: Vec<Load>,
    pub(super) layout: Option<Laid>,
}

/// A layout, and the loads that are in it, in the order of their places.
pub(super) struct Laid {
    layout: Layout,
    loads: Vec<usize>,
    nbytes: usize,
}

#[pymethods]
impl DevicePlan {
    /// Leaves may refer to what holds the plan.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        for object in [&self.device, &self.pin_memory, &self.context] {
            visit.call(object)?;
        }
        for BoundField { key, field, column, .. } in &self.fields {
            visit.call(key)?;
            visit.call(field)?;
            visit.call(column)?;
        }
        for Load { leaves, home, .. } in &self.loads {
            for leaf in leaves {
                visit.call(leaf)?;
            }
            if let Some((list, _)) = home {
                visit.call(list)?;
            }
        }
        visit.call(&self.collator)
    }

    fn __clear__(&mut self) {
        self.fields.clear();
        self.loads.clear();
        self.layout = None;
    }

    /// For each field `(name, its first load, its last + 1)`.
    #[getter]
    fn fields<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let fields = self.fields.iter().map(|field| {
            let Range { start, end } = field.loads;
            (field.key.clone_ref(py), start, end).into_pyobject(py)
        });
        PyList::new(py, fields.collect::<PyResult<Vec<_>>>()?)
    }

    /// For each load `(its first leaf, sizes, strides, bytes, number of leaves, where it belongs)`:
    /// `(list, index)`, or `None` if it is its field's batch.
    #[getter]
    fn loads<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        for Load { output, leaves, home, .. } in &self.loads {
            let home = home.as_ref().map(|(list, index)| (list.bind(py), *index));
            let strides = shape::contiguous_strides(&output.sizes)
                .map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
            let sizes = PyTuple::new(py, output.sizes.iter())?;
            let strides = PyTuple::new(py, strides.iter())?;
            let leaf = leaves[0].bind(py);
            list.append((leaf, sizes, strides, output.nbytes, leaves.len(), home))?;
        }
        Ok(list)
    }

    /// Lays the loads of some fields out: `own` says for each field whether it gets an allocation
    /// (a list: one for each element) of its own, or `None` if it is left out. Returns
    /// `(bytes of the host buffer, ranges of it that are an allocation each, for each load the
    /// allocation and the offset in it, or None)`.
    #[allow(clippy::type_complexity)]
    fn lay_out(
        &mut self,
        own: Vec<Option<bool>>,
    ) -> PyResult<(usize, Vec<(usize, usize)>, Vec<Option<(usize, usize)>>)> {
        if own.len() != self.fields.len() {
            return Err(PyValueError::new_err("mmcollate: one choice for each field"));
        }
        let mut loads = Vec::new();
        let mut demands = Vec::new();
        for (field, own) in self.fields.iter().zip(own) {
            let Some(own) = own else { continue };
            for load in field.loads.clone() {
                let Output { nbytes, dtype, .. } = self.loads[load].output;
                loads.push(load);
                demands.push(Demand { nbytes, floating: dtype.is_floating(), own });
            }
        }
        let layout =
            plan::lay_out(&demands).map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        let mut places = vec![None; self.loads.len()];
        for (at, &load) in loads.iter().enumerate() {
            let part = layout.part_of[at];
            places[load] = Some((part, layout.offsets[at] - layout.parts[part].start));
        }
        let parts: Vec<_> = layout.parts.iter().map(|part| (part.start, part.end)).collect();
        let nbytes = layout.parts.last().map_or(0, |part| part.end);
        let mut order: Vec<_> = (0..loads.len()).collect();
        order.sort_by_key(|&at| layout.offsets[at]);
        let in_order = |values: &[usize]| order.iter().map(|&at| values[at]).collect::<Vec<_>>();
        let layout = Layout {
            offsets: in_order(&layout.offsets),
            part_of: in_order(&layout.part_of),
            parts: layout.parts,
        };
        self.layout = Some(Laid { layout, loads: in_order(&loads), nbytes });
        Ok((nbytes, parts, places))
    }

    /// The leaves of a load of at least so many bytes that lie in it as they are, one after the
    /// other: `(leaf, offset in the load, bytes)`.
    fn large_leaves<'py>(
        &self,
        py: Python<'py>,
        load: usize,
        at_least: usize,
    ) -> PyResult<Bound<'py, PyList>> {
        let load = self.loads.get(load).ok_or_else(|| PyValueError::new_err("no such load"))?;
        let list = PyList::empty(py);
        let mut offset = 0;
        for (at, nbytes) in load.output.whole_leaves().enumerate() {
            if nbytes >= at_least.max(1) {
                list.append((load.leaves[at].bind(py), offset, nbytes))?;
            }
            offset += nbytes;
        }
        Ok(list)
    }

    /// Writes the bytes `start..stop` of the host buffer to `into`, a contiguous `uint8` tensor on
    /// the host; what lies between the loads is zero. `False` if a leaf is no longer as it was
    /// planned; what was written is then to be thrown away.
    fn gather(
        &self,
        py: Python<'_>,
        into: &Bound<'_, PyAny>,
        start: usize,
        stop: usize,
    ) -> PyResult<bool> {
        let refused = |why: &str| PyValueError::new_err(format!("mmcollate: {why}"));
        let laid = self.layout.as_ref().ok_or_else(|| refused("nothing is laid out"))?;
        if start > stop || stop > laid.nbytes {
            return Err(refused("a range outside the layout"));
        }
        let collator = self.collator.get();
        let target = collator.borrow(into).filter(|into| is_byte_buffer(into, stop - start));
        let target =
            target.map(|into| SegmentPtr::new(into.data().cast_mut())).ok_or_else(|| {
                refused("needs a contiguous uint8 tensor on the host, as long as the range")
            })?;
        let Some(jobs) = self.jobs(py, collator, laid, start..stop)? else {
            return Ok(false);
        };
        let nbytes: usize = jobs.iter().map(|job| job.range.len()).sum();
        add(&collator.counters().bytes_gathered, nbytes as u64);
        // The target's address was read before the leaves': they are asked for nothing that runs
        // Python code, and neither is anything from here on.
        let run = move || {
            let mut written = start;
            for Job { output, sources, offset, range } in &jobs {
                let first = offset + range.start;
                // SAFETY: the gap before this load lies inside `start..stop`, for which the
                // target has room.
                unsafe { gather::zero(target.plus(written - start), first - written) };
                // SAFETY: (1) the leaves were found to be as planned; (2) the plan holds them, and
                // no Python code has run here since (see `source.rs` for other threads); (3) the
                // range lies inside `start..stop`, and the target is the caller's to write to.
                unsafe {
                    gather::gather_range(
                        output,
                        sources,
                        target.plus(first - start),
                        range.clone(),
                    );
                }
                written = offset + range.end;
            }
            // SAFETY: as for the gaps between.
            unsafe { gather::zero(target.plus(written - start), stop - written) };
        };
        if stop - start < DETACH_FROM {
            run();
        } else {
            py.detach(run);
        }
        Ok(true)
    }

    /// Counts so many fields as staged.
    fn count(&self, fields: u64) {
        add(&self.collator.get().counters().stage, fields);
    }

    /// What the reference makes of one field.
    fn reduce<'py>(
        &self,
        py: Python<'py>,
        field: usize,
        reason: &str,
    ) -> PyResult<Bound<'py, PyAny>> {
        let field = self.fields.get(field).ok_or_else(|| PyValueError::new_err("no such field"))?;
        let reason = Reason::ALL.iter().copied().find(|known| known.name() == reason);
        let reason = reason.ok_or_else(|| PyValueError::new_err("no such reason"))?;
        self.collator.get().call_reference(
            py,
            field.key.bind(py),
            field.field.bind(py),
            field.column.bind(py),
            self.device.bind(py),
            self.pin_memory.bind(py),
            reason,
            self.context.bind(py),
        )
    }
}

/// What one gather does for one load.
struct Job<'a> {
    output: &'a Output,
    sources: Vec<SourcePtr>,
    offset: usize,
    range: Range<usize>,
}

impl DevicePlan {
    /// Adds a field of a table.
    pub(super) fn push(&mut self, table: &Table<'_>, k: usize, loads: Vec<Load>) -> PyResult<()> {
        let Column { key, field, .. } = &table.columns[k];
        let start = self.loads.len();
        self.loads.extend(loads);
        self.fields.push(BoundField {
            key: key.clone().unbind(),
            field: field.clone().unbind(),
            column: table.column_for_reference(k, key.py())?.unbind(),
            loads: start..self.loads.len(),
        });
        Ok(())
    }

    /// The gathers that fill a range, in its order; `None` if a leaf is not as it was planned.
    fn jobs<'a>(
        &'a self,
        py: Python<'_>,
        collator: &Collator,
        laid: &'a Laid,
        range: Range<usize>,
    ) -> PyResult<Option<Vec<Job<'a>>>> {
        let mut jobs = Vec::new();
        for (at, &load) in laid.loads.iter().enumerate() {
            let Load { output, layouts, leaves, .. } = &self.loads[load];
            let offset = laid.layout.offsets[at];
            let start = range.start.max(offset);
            let end = range.end.min(offset + output.nbytes);
            if start >= end {
                continue;
            }
            let range = start - offset..end - offset;
            let among = output.leaves_in(&range, leaves.len());
            let mut sources = Vec::with_capacity(among.len());
            for leaf in among {
                match collator.borrow(leaves[leaf].bind(py)) {
                    Some(borrowed) if as_planned(&borrowed, layouts, leaf) => {
                        sources.push(borrowed.source());
                    }
                    _ => return Ok(None),
                }
            }
            jobs.push(Job { output, sources, offset, range });
        }
        Ok(Some(jobs))
    }
}

fn as_planned(leaf: &Borrowed<'_>, layouts: &Layouts, at: usize) -> bool {
    let contiguous = shape::is_contiguous(leaf.sizes(), leaf.strides());
    leaf.on_cpu()
        && leaf.dtype() == layouts.dtype()
        && leaf.sizes() == layouts.sizes(at)
        && match layouts.strides(at) {
            Some(strides) => leaf.strides() == strides,
            None => contiguous,
        }
        && (!leaf.data().is_null() || leaf.sizes().contains(&0))
}

/// Whether a borrowed tensor can be written to as `nbytes` plain bytes.
fn is_byte_buffer(tensor: &Borrowed<'_>, nbytes: usize) -> bool {
    tensor.on_cpu()
        && tensor.dtype() == DType::new(code::UINT, 8)
        && shape::is_contiguous(tensor.sizes(), tensor.strides())
        && shape::element_count(tensor.sizes()).is_ok_and(|count| count >= nbytes)
        && (nbytes == 0 || !tensor.data().is_null())
}
