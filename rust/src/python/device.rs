//! What is bound for a device: planned and gathered here, allocated and copied by the caller.
//!
//! A [`DevicePlan`] holds the leaves themselves and no address: between planning and gathering any
//! Python code may run, so each gather reads its leaves anew and refuses any that is not as it was.

use std::ops::Range;

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use smallvec::SmallVec;

use super::buffer::DETACH_FROM;
use super::collator::Collator;
use super::exchange::Borrowed;
use super::guard::Elements;
use super::items::{Column, Table};
use super::reason::{Reason, add};
use crate::dtype::{DType, code};
use crate::gather::{self, Part, SegmentPtr};
use crate::plan::{self, Demand, Layout, Output};
use crate::shape;
use crate::source::{Layouts, SourcePtr};

/// One tensor on the device: the leaves that it is gathered from, and how.
pub(super) struct Load {
    pub(super) output: Output,
    pub(super) layouts: Layouts,
    /// Most loads are of one leaf.
    pub(super) leaves: SmallVec<[Py<PyAny>; 1]>,
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

/// A layout of some of the loads.
pub(super) struct Laid {
    parts: Vec<Range<usize>>,
    /// For each load its place, if it is laid out.
    places: Vec<Option<Place>>,
    /// The loads that are, in the order of their places.
    order: Vec<usize>,
    nbytes: usize,
}

/// Where a load lies: in which allocation, and at which byte of the host buffer.
#[derive(Clone, Copy)]
struct Place {
    part: usize,
    offset: usize,
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

    /// For each field `(name, whether it is a list, bytes of the smallest load, whether each is of
    /// one leaf)`.
    #[getter]
    fn fields<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let fields = self.fields.iter().map(|field| {
            let loads = &self.loads[field.loads.clone()];
            let is_list = loads.first().is_some_and(|load| load.home.is_some());
            let single = loads.iter().all(|load| load.leaves.len() == 1);
            let smallest = loads.iter().map(|load| load.output.nbytes).min().unwrap_or(0);
            (field.key.clone_ref(py), is_list, smallest, single).into_pyobject(py)
        });
        PyList::new(py, fields.collect::<PyResult<Vec<_>>>()?)
    }

    /// How many loads there are, and their bytes.
    #[getter]
    fn totals(&self) -> (usize, usize) {
        let nbytes = self.loads.iter().map(|load| load.output.nbytes);
        (self.loads.len(), nbytes.fold(0, usize::saturating_add))
    }

    /// The first leaf of each load of a field.
    fn first_leaves<'py>(&self, py: Python<'py>, field: usize) -> PyResult<Bound<'py, PyList>> {
        let loads = &self.loads[self.field(field)?.loads.clone()];
        PyList::new(py, loads.iter().map(|load| load.leaves[0].bind(py)))
    }

    /// Lays the loads of some fields out: `own` says for each field whether it gets an allocation
    /// (a list: one for each element) of its own, or `None` if it is left out. Returns the ranges
    /// of the host buffer that are an allocation each.
    fn lay_out(&mut self, own: Vec<Option<bool>>) -> PyResult<Vec<(usize, usize)>> {
        if own.len() != self.fields.len() {
            return Err(PyValueError::new_err("mmcollate: one choice for each field"));
        }
        let mut loads = Vec::with_capacity(self.loads.len());
        let mut demands = Vec::with_capacity(self.loads.len());
        for (field, own) in self.fields.iter().zip(own) {
            let Some(own) = own else { continue };
            for load in field.loads.clone() {
                let Output { nbytes, dtype, .. } = self.loads[load].output;
                loads.push(load);
                demands.push(Demand { nbytes, floating: dtype.is_floating(), own });
            }
        }
        let Layout { offsets, part_of, parts, order } =
            plan::lay_out(&demands).map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        let mut places = vec![None; self.loads.len()];
        for (at, &load) in loads.iter().enumerate() {
            places[load] = Some(Place { part: part_of[at], offset: offsets[at] });
        }
        let order = order.into_iter().map(|at| loads[at]).collect();
        let nbytes = parts.last().map_or(0, |part| part.end);
        let pairs = parts.iter().map(|part| (part.start, part.end)).collect();
        self.layout = Some(Laid { parts, places, order, nbytes });
        Ok(pairs)
    }

    /// The leaves of at least so many bytes that lie in the layout as they are: `(leaf, its part,
    /// offset in the part, bytes, whether its load has no other)`.
    fn large_leaves<'py>(&self, py: Python<'py>, at_least: usize) -> PyResult<Bound<'py, PyList>> {
        let laid = self.laid()?;
        let list = PyList::empty(py);
        for &load in &laid.order {
            let Load { output, leaves, .. } = &self.loads[load];
            if output.nbytes < at_least.max(1) {
                continue;
            }
            let Some(Place { part, offset }) = laid.places[load] else { continue };
            let mut offset = offset - laid.parts[part].start;
            for (at, nbytes) in output.whole_leaves().enumerate() {
                if nbytes >= at_least.max(1) {
                    list.append((leaves[at].bind(py), part, offset, nbytes, leaves.len() == 1))?;
                }
                offset += nbytes;
            }
        }
        Ok(list)
    }

    /// Puts a field into the batch, as tensors in the device's allocations: `uint8` tensors, one
    /// for each part of the layout. `False`, and nothing is done, if some of it does not lie in the
    /// first `sent` bytes of the host buffer.
    fn carve<'py>(
        &self,
        py: Python<'py>,
        field: usize,
        buffers: Vec<Bound<'py, PyAny>>,
        sent: usize,
        batch: &Bound<'py, PyDict>,
    ) -> PyResult<bool> {
        let laid = self.laid()?;
        let BoundField { key, loads, .. } = self.field(field)?;
        let collator = self.collator.get();
        let torch = collator.torch();
        let places = loads.clone().map(|load| laid.places[load]).collect::<Option<Vec<_>>>();
        let places = places.ok_or_else(|| refused("a field that is not laid out"))?;
        let loads = &self.loads[loads.clone()];
        if places.iter().zip(loads).any(|(place, load)| place.offset + load.output.nbytes > sent) {
            return Ok(false);
        }
        let mut typed: Option<Typed<'py>> = None;
        for (Place { part, offset }, Load { output, home, .. }) in places.into_iter().zip(loads) {
            let Output { dtype, sizes, .. } = output;
            let Range { start, end } = laid.parts[part];
            let buffer = match &typed {
                Some(typed) if (typed.part, typed.dtype) == (part, *dtype) => typed,
                _ => {
                    let bytes = buffers.get(part).ok_or_else(|| refused("a buffer is missing"))?;
                    let borrowed = collator.borrow(bytes);
                    let has_room = match &borrowed {
                        Some(bytes) => is_bytes(bytes, end - start),
                        // Of a device that no door knows.
                        None => {
                            bytes.call_method0("is_contiguous")?.is_truthy()?
                                && bytes.call_method0("numel")?.extract::<usize>()? >= end - start
                        }
                    };
                    if !has_room {
                        return Err(refused("needs a contiguous uint8 buffer with room"));
                    }
                    let simple = borrowed.is_some_and(|bytes| bytes.is_of_simple_device());
                    let elements = torch.elements(bytes, *dtype, simple)?;
                    &*typed.insert(Typed { part, dtype: *dtype, elements })
                }
            };
            let first = (offset - start) / dtype.item_size().unwrap_or(1);
            let tensor = torch.dense_in(&buffer.elements, sizes, first)?;
            match home {
                Some((list, index)) => list.bind(py).set_item(*index, tensor)?,
                None => batch.set_item(key, tensor)?,
            }
        }
        Ok(true)
    }

    /// Writes the bytes `start..stop` of the host buffer to `into`, a contiguous `uint8` tensor on
    /// the host, from its byte `at` on; what lies between the loads is zero. `False` if a leaf is no
    /// longer as it was planned; what was written is then to be thrown away.
    fn gather(
        &self,
        py: Python<'_>,
        into: &Bound<'_, PyAny>,
        at: usize,
        start: usize,
        stop: usize,
    ) -> PyResult<bool> {
        let laid = self.laid()?;
        if start > stop || stop > laid.nbytes {
            return Err(refused("a range outside the layout"));
        }
        let collator = self.collator.get();
        let target = collator.borrow(into).filter(|into| {
            let needed = at.checked_add(stop - start);
            into.on_cpu() && needed.is_some_and(|needed| is_bytes(into, needed))
        });
        let target = target
            .map(|into| SegmentPtr::new(into.data().cast_mut()).plus(at))
            .ok_or_else(|| refused("needs a contiguous uint8 tensor on the host with room"))?;
        let Some((jobs, sources)) = self.jobs(py, collator, laid, start..stop)? else {
            return Ok(false);
        };
        let nbytes: usize = jobs.iter().map(|job| job.range.len()).sum();
        add(&collator.counters().bytes_gathered, nbytes as u64);
        // The target's address was read before the leaves': they are asked for nothing that runs
        // Python code, and neither is anything from here on.
        let run = move || {
            let mut written = start;
            let mut parts = Vec::with_capacity(jobs.len());
            for Job { output, leaves, offset, range } in &jobs {
                let first = offset + range.start;
                let gap = first - written;
                // SAFETY: the gap before this load lies inside `start..stop`, for which the
                // target has room.
                unsafe { gather::zero(target.plus(written - start), gap) };
                let (sources, segment) = (&sources[leaves.clone()], target.plus(first - start));
                parts.push(Part { output, sources, segment, range: range.clone() });
                written = offset + range.end;
            }
            // SAFETY: as for the gaps between.
            unsafe { gather::zero(target.plus(written - start), stop - written) };
            // SAFETY: (1) the leaves were found to be as planned; (2) the plan holds them, and no
            // Python code has run here since (see `source.rs` for other threads); (3) the ranges
            // lie inside `start..stop` and do not overlap, and the target is the caller's to
            // write to.
            unsafe { gather::gather_parts(&parts) }
        };
        let shared = if stop - start < DETACH_FROM { run() } else { py.detach(run) };
        add(&collator.counters().shared_pieces, shared as u64);
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
        let field = self.field(field)?;
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

/// An allocation on the device as elements of a type.
struct Typed<'py> {
    part: usize,
    dtype: DType,
    elements: Elements<'py>,
}

/// What one gather does for one load.
struct Job<'a> {
    output: &'a Output,
    /// Which of all the sources are its own.
    leaves: Range<usize>,
    offset: usize,
    range: Range<usize>,
}

fn refused(why: &str) -> PyErr {
    PyValueError::new_err(format!("mmcollate: {why}"))
}

impl DevicePlan {
    /// Adds a field of a table.
    pub(super) fn push(&mut self, table: &Table<'_>, k: usize, loads: Vec<Load>) -> PyResult<()> {
        let Column { key, field, .. } = &table.columns[k];
        let start = self.loads.len();
        match start {
            0 => self.loads = loads,
            _ => self.loads.extend(loads),
        }
        self.fields.push(BoundField {
            key: key.clone().unbind(),
            field: field.clone().unbind(),
            column: table.column_for_reference(k, key.py())?.unbind(),
            loads: start..self.loads.len(),
        });
        Ok(())
    }

    fn field(&self, field: usize) -> PyResult<&BoundField> {
        self.fields.get(field).ok_or_else(|| refused("no such field"))
    }

    fn laid(&self) -> PyResult<&Laid> {
        self.layout.as_ref().ok_or_else(|| refused("nothing is laid out"))
    }

    /// The gathers that fill a range, in its order, and the leaves of all of them; `None` if one is
    /// not as it was planned.
    #[allow(clippy::type_complexity)]
    fn jobs<'a>(
        &'a self,
        py: Python<'_>,
        collator: &Collator,
        laid: &'a Laid,
        range: Range<usize>,
    ) -> PyResult<Option<(Vec<Job<'a>>, Vec<SourcePtr>)>> {
        let ends_before = |&load: &usize| {
            let offset = laid.places[load].map_or(0, |place| place.offset);
            offset + self.loads[load].output.nbytes <= range.start
        };
        let first = laid.order.partition_point(ends_before);
        let mut jobs = Vec::with_capacity(laid.order.len() - first);
        let mut sources = Vec::with_capacity(laid.order.len() - first);
        for &load in &laid.order[first..] {
            let Load { output, layouts, leaves, .. } = &self.loads[load];
            let Some(Place { offset, .. }) = laid.places[load] else { continue };
            if offset >= range.end {
                break;
            }
            let start = range.start.max(offset);
            let end = range.end.min(offset + output.nbytes);
            if start >= end {
                continue;
            }
            let range = start - offset..end - offset;
            let first = sources.len();
            for leaf in output.leaves_in(&range, leaves.len()) {
                match collator.borrow(leaves[leaf].bind(py)) {
                    Some(borrowed) if as_planned(&borrowed, layouts, leaf) => {
                        sources.push(borrowed.source());
                    }
                    _ => return Ok(None),
                }
            }
            jobs.push(Job { output, leaves: first..sources.len(), offset, range });
        }
        Ok(Some((jobs, sources)))
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

/// Whether a borrowed tensor is so many bytes, or more, without gaps.
fn is_bytes(tensor: &Borrowed<'_>, nbytes: usize) -> bool {
    tensor.dtype() == DType::new(code::UINT, 8)
        && shape::is_contiguous(tensor.sizes(), tensor.strides())
        && shape::element_count(tensor.sizes()).is_ok_and(|count| count >= nbytes)
        && (nbytes == 0 || !tensor.data().is_null())
}
