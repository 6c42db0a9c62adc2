//! One batch, from items to outputs: walk, decide, gather, hand the rest to the reference.

use pyo3::exceptions::{PyException, PyOverflowError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyList, PyString};

use super::buffer::{self, Gather, Planned};
use super::exchange::{Door, Leaves};
use super::guard::{self, Torch};
use super::items::{FieldTypes, Form, Next, Table, Walker};
use super::reason::{COUNTERS, Reason, add};
use super::values::{Through, is_list, is_scalar};
use crate::plan::{Kind, Placement};

/// Where the caller wants the batch.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Target {
    /// Each value stays where it is.
    AsIs,
    /// On the host.
    Cpu,
    /// On a device: kept fields on the host, the others are copied by the reference.
    Device,
}

/// What becomes of one field.
enum Decision<'a> {
    /// The first value itself.
    Alias,
    /// The only tensor with a new first dimension.
    View,
    /// A new list of the values.
    List,
    /// A new list of what the values, themselves lists, hold.
    Flatten,
    /// A fresh tensor.
    Gather(Gather<'a>),
    /// Whatever the reference makes of it.
    Reference(Reason),
}

/// A field's decision, with what carrying it out needs.
struct Decided<'a> {
    keep_on_cpu: bool,
    through: Through<'a>,
    decision: Decision<'a>,
}

impl<'a> Decision<'a> {
    fn gather(&self) -> Option<&Gather<'a>> {
        match self {
            Self::Gather(gather) => Some(gather),
            _ => None,
        }
    }

    /// The way, and why if it is the reference's.
    fn named(&self) -> (&'static str, &'static str) {
        match self {
            Self::Alias => ("alias", ""),
            Self::View => ("view", ""),
            Self::List | Self::Flatten => ("list", ""),
            Self::Gather(_) => ("gather", ""),
            Self::Reference(reason) => ("reference", reason.name()),
        }
    }
}

/// Collates items of one form. Holds no data between calls.
#[pyclass(frozen, module = "mmcollate._core")]
pub(super) struct Collator {
    form: Form,
    types: FieldTypes,
    torch: Torch,
    door: Door,
    /// `reduce(key, field, values or elements, device, pin_memory, reason, context)`: the
    /// reference for one field.
    reduce: Py<PyAny>,
    /// `can_batch(left, right)`: the reference's comparison of two items.
    can_batch: Py<PyAny>,
}

#[pymethods]
impl Collator {
    /// Of items whose attribute `data` is a dict of elements with `data` and `field`.
    #[staticmethod]
    #[pyo3(signature = (*, item, element, batched, flat, shared, reduce, can_batch, only_device_contexts, skip_table=false))]
    #[allow(clippy::too_many_arguments)]
    fn of_elements(
        py: Python<'_>,
        item: Py<PyAny>,
        element: Py<PyAny>,
        batched: Py<PyAny>,
        flat: Py<PyAny>,
        shared: Py<PyAny>,
        reduce: Py<PyAny>,
        can_batch: Py<PyAny>,
        only_device_contexts: Py<PyAny>,
        skip_table: bool,
    ) -> PyResult<Self> {
        let types = FieldTypes { batched, flat, shared };
        let form = Form::Elements { item, element };
        Self::new(py, form, types, reduce, can_batch, only_device_contexts, skip_table)
    }

    /// Of mappings from name to value.
    #[staticmethod]
    #[pyo3(signature = (*, normalize, report, batched, flat, shared, reduce, can_batch, only_device_contexts, skip_table=false))]
    #[allow(clippy::too_many_arguments)]
    fn of_mappings(
        py: Python<'_>,
        normalize: Py<PyAny>,
        report: Py<PyAny>,
        batched: Py<PyAny>,
        flat: Py<PyAny>,
        shared: Py<PyAny>,
        reduce: Py<PyAny>,
        can_batch: Py<PyAny>,
        only_device_contexts: Py<PyAny>,
        skip_table: bool,
    ) -> PyResult<Self> {
        let types = FieldTypes { batched, flat, shared };
        let form = Form::Plain { normalize, report };
        Self::new(py, form, types, reduce, can_batch, only_device_contexts, skip_table)
    }

    /// Collates the group that starts at `start`; it ends before `stop` at the latest. Returns the
    /// index after its last item, and its batch: `None` if only the reference can make it.
    #[allow(clippy::too_many_arguments)]
    fn next_group<'py>(
        &self,
        py: Python<'py>,
        items: &Bound<'py, PyAny>,
        start: usize,
        stop: usize,
        fields: Option<&Bound<'py, PyDict>>,
        device: &Bound<'py, PyAny>,
        pin_memory: &Bound<'py, PyAny>,
        context: &Bound<'py, PyAny>,
    ) -> PyResult<(usize, Option<Bound<'py, PyDict>>)> {
        let call = Call::new(self, py, device, pin_memory, context)?;
        let (end, table) = self.walk_group(&call, items, start, stop, fields)?;
        let batch = table.map(|table| self.collate(&call, &table)).transpose()?;
        if batch.is_none() {
            COUNTERS.count_reference(Reason::ItemClass);
        }
        Ok((end, batch))
    }

    /// Collates all items into one batch, as they are; `None` if only the reference can.
    fn batch<'py>(
        &self,
        py: Python<'py>,
        items: &Bound<'py, PyAny>,
        device: &Bound<'py, PyAny>,
        pin_memory: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyDict>>> {
        let context = py.None().into_bound(py);
        let call = Call::new(self, py, device, pin_memory, &context)?;
        let walker = self.walker(None, &context);
        let mut table: Option<Table<'py>> = None;
        for (at, item) in items.try_iter()?.enumerate() {
            let item = item?;
            match &mut table {
                None => table = walker.first(item, at)?,
                Some(rows) => match walker.next(rows, item, at, false)? {
                    Next::Joined => {}
                    Next::Differs | Next::Unsure => table = None,
                },
            }
            if table.is_none() {
                COUNTERS.count_reference(Reason::ItemClass);
                return Ok(None);
            }
        }
        match table {
            Some(table) => self.collate(&call, &table).map(Some),
            None => Ok(Some(PyDict::new(py))),
        }
    }

    /// What `next_group` would do, without doing it: the end of the group, and for each field
    /// `(name, placement, way, bytes, buffer, offset, reason)`; `None` where the reference would
    /// take the whole group.
    #[allow(clippy::type_complexity, clippy::too_many_arguments)]
    fn explain_group<'py>(
        &self,
        py: Python<'py>,
        items: &Bound<'py, PyAny>,
        start: usize,
        stop: usize,
        fields: Option<&Bound<'py, PyDict>>,
        device: &Bound<'py, PyAny>,
        pin_memory: &Bound<'py, PyAny>,
        context: &Bound<'py, PyAny>,
    ) -> PyResult<(usize, Option<Bound<'py, PyList>>)> {
        let call = Call::new(self, py, device, pin_memory, context)?;
        let (end, table) = self.walk_group(&call, items, start, stop, fields)?;
        let Some(table) = table else {
            return Ok((end, None));
        };
        let decided = self.decide_all(&call, &table)?;
        let gathers: Vec<_> = decided.iter().filter_map(|field| field.decision.gather()).collect();
        let places = buffer::place(&gathers)
            .map_err(|error| PyOverflowError::new_err(error.to_string()))?
            .places;
        let mut places = places.into_iter();
        let report = PyList::empty(py);
        for (key, Decided { keep_on_cpu, decision, .. }) in table.keys.iter().zip(&decided) {
            let placement = if *keep_on_cpu { "cpu" } else { "device" };
            let nbytes = decision.gather().map_or(0, Gather::nbytes);
            let place = decision.gather().and_then(|_| places.next());
            let (buffer, offset) = place.unzip();
            let (way, reason) = decision.named();
            report.append((key, placement, way, nbytes, buffer, offset, reason))?;
        }
        Ok((end, Some(report)))
    }

    /// Whether tensors are read through torch's exchange table.
    #[getter]
    fn has_exchange_table(&self) -> bool {
        self.door.has_table()
    }
}

/// The arguments of one call.
struct Call<'a, 'py> {
    py: Python<'py>,
    device: &'a Bound<'py, PyAny>,
    pin_memory: &'a Bound<'py, PyAny>,
    context: &'a Bound<'py, PyAny>,
    target: Target,
    pinned: bool,
    /// Set if every field goes to the reference: a torch mode wants to see the operations, or
    /// `pin_memory` is no bool, which torch refuses where it gets to see it.
    all_reference: Option<Reason>,
}

impl<'a, 'py> Call<'a, 'py> {
    fn new(
        collator: &Collator,
        py: Python<'py>,
        device: &'a Bound<'py, PyAny>,
        pin_memory: &'a Bound<'py, PyAny>,
        context: &'a Bound<'py, PyAny>,
    ) -> PyResult<Self> {
        // The reference knows the host by these two spellings alone: "cpu:0" is a device to it.
        let target = if device.is_none() {
            Target::AsIs
        } else if let Ok(name) = device.cast_exact::<PyString>() {
            if name.to_cow().is_ok_and(|name| name == "cpu") { Target::Cpu } else { Target::Device }
        } else if device.get_type_ptr().cast() == collator.torch.device_type.as_ptr()
            && device.eq(&collator.torch.cpu)?
        {
            Target::Cpu
        } else {
            Target::Device
        };
        let all_reference = if collator.torch.is_observed(py)? {
            Some(Reason::TorchMode)
        } else if pin_memory.is_exact_instance_of::<PyBool>() {
            None
        } else {
            Some(Reason::Pinned)
        };
        let pinned = all_reference.is_none() && pin_memory.is_truthy()?;
        Ok(Self { py, device, pin_memory, context, target, pinned, all_reference })
    }
}

impl Collator {
    fn new(
        py: Python<'_>,
        form: Form,
        types: FieldTypes,
        reduce: Py<PyAny>,
        can_batch: Py<PyAny>,
        only_device_contexts: Py<PyAny>,
        skip_table: bool,
    ) -> PyResult<Self> {
        let torch = py.import("torch")?;
        Ok(Self {
            form,
            types,
            torch: Torch::new(&torch, only_device_contexts)?,
            door: Door::open(&torch, skip_table)?,
            reduce,
            can_batch,
        })
    }

    fn walker<'a, 'py>(
        &'a self,
        fields: Option<&'a Bound<'py, PyDict>>,
        context: &'a Bound<'py, PyAny>,
    ) -> Walker<'a, 'py> {
        let Self { form, types, torch, door, .. } = self;
        Walker { form, types, torch, door, fields, context }
    }

    /// The group from `start` on: its end, and its rows unless only the reference can read them.
    fn walk_group<'py>(
        &self,
        call: &Call<'_, 'py>,
        items: &Bound<'py, PyAny>,
        start: usize,
        stop: usize,
        fields: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<(usize, Option<Table<'py>>)> {
        let walker = self.walker(fields, call.context);
        // The length is asked for each time: the caller may change the list between groups.
        if start >= items.len()? {
            return Ok((start + 1, None));
        }
        let mut left = items.get_item(start)?;
        let mut table = walker.first(left.clone(), start)?;
        let mut end = start + 1;
        while end < stop && end < items.len()? {
            let right = items.get_item(end)?;
            let next = match &mut table {
                Some(rows) if call.all_reference.is_none() => {
                    walker.next(rows, right.clone(), end, true)?
                }
                _ => Next::Unsure,
            };
            match next {
                Next::Joined => {}
                Next::Differs => break,
                Next::Unsure => {
                    let can_batch = self.can_batch.bind(call.py);
                    if !can_batch.call1((&left, &right, fields, call.context))?.is_truthy()? {
                        break;
                    }
                    if let Some(rows) = &mut table
                        && !matches!(walker.next(rows, right.clone(), end, false)?, Next::Joined)
                    {
                        table = None;
                    }
                }
            }
            left = right;
            end += 1;
        }
        Ok((end, table))
    }

    fn decide_all<'a>(
        &'a self,
        call: &Call<'_, '_>,
        table: &'a Table<'_>,
    ) -> PyResult<Vec<Decided<'a>>> {
        let mut grad_enabled = None;
        let mut decided = Vec::with_capacity(table.keys.len());
        // All declarations before the first leaf is borrowed: from then on no Python code runs
        // until the gather has read it.
        let declared = table.fields.iter().map(|field| self.types.read(&self.torch.names, field));
        let declared = declared.collect::<PyResult<Vec<_>>>()?;
        for (k, declared) in declared.into_iter().enumerate() {
            // What is kept goes to the host whatever device is asked for.
            let to_cpu = match call.target {
                Target::AsIs => false,
                Target::Cpu => true,
                Target::Device => declared.keep_on_cpu,
            };
            let through = Through { torch: &self.torch, to_cpu };
            let decision = match (call.all_reference, declared.kind) {
                (Some(reason), _) => Decision::Reference(reason),
                (None, None) => Decision::Reference(Reason::FieldClass),
                _ if table.mixed[k] => Decision::Reference(Reason::MixedKinds),
                _ if call.target == Target::Device && !to_cpu => {
                    Decision::Reference(Reason::DeviceTarget)
                }
                (None, Some(kind)) => {
                    let placement =
                        if declared.keep_on_cpu { Placement::Cpu } else { Placement::Device };
                    self.decide(call, table, k, kind, placement, through, &mut grad_enabled)?
                }
            };
            decided.push(Decided { keep_on_cpu: declared.keep_on_cpu, through, decision });
        }
        Ok(decided)
    }

    #[allow(clippy::too_many_arguments)]
    fn decide<'a>(
        &self,
        call: &Call<'_, '_>,
        table: &'a Table<'_>,
        k: usize,
        kind: Kind,
        placement: Placement,
        through: Through<'_>,
        grad_enabled: &mut Option<bool>,
    ) -> PyResult<Decision<'a>> {
        let first = table.first(k);
        let one_tensor = table.rows() == 1 && self.torch.is_tensor(first);
        if kind == Kind::Shared || one_tensor {
            // Where nothing moves, any value passes.
            return Ok(if through.to_cpu && !through.passes_nested(first)? {
                Decision::Reference(Reason::NotOnCpu)
            } else if kind == Kind::Batched {
                Decision::View
            } else {
                Decision::Alias
            });
        }
        if !self.torch.is_tensor(first) {
            return self.decide_values(table, k, kind, through);
        }
        if call.pinned && call.target == Target::AsIs && placement == Placement::Device {
            return Ok(Decision::Reference(Reason::Pinned));
        }
        let grad_enabled = match *grad_enabled {
            Some(known) => known,
            None => *grad_enabled.insert(self.torch.is_grad_enabled(call.py)?),
        };
        self.decide_tensors(table, k, kind, placement, through, grad_enabled)
    }

    /// A field whose first value is a tensor, of several items.
    fn decide_tensors<'a>(
        &self,
        table: &'a Table<'_>,
        k: usize,
        kind: Kind,
        placement: Placement,
        through: Through<'_>,
        grad_enabled: bool,
    ) -> PyResult<Decision<'a>> {
        let mut leaves: Option<Leaves<'a>> = None;
        for leaf in table.column(k) {
            if !self.torch.is_tensor(leaf) {
                // Only a list of tensors alone is stacked or concatenated.
                return if kind == Kind::Batched && (is_scalar(leaf) || is_list(leaf)) {
                    self.decide_values(table, k, kind, through)
                } else {
                    Ok(Decision::Reference(Reason::MixedLeaves))
                };
            }
            if kind == Kind::Batched
                && leaves.as_ref().is_some_and(|leaves| !leaves.layouts.uniform())
            {
                // A ragged list is what it is, whatever else its leaves are.
                if !through.passes(leaf)? {
                    return Ok(Decision::Reference(Reason::NotOnCpu));
                }
                continue;
            }
            let borrowed = match guard::readable(&self.door, &self.torch, leaf, grad_enabled)? {
                Ok(borrowed) => borrowed,
                Err(reason) => return Ok(Decision::Reference(reason)),
            };
            match &mut leaves {
                Some(leaves) if borrowed.dtype() != leaves.layouts.dtype() => {
                    return Ok(Decision::Reference(Reason::MixedDtypes));
                }
                Some(leaves) => leaves.push(&borrowed),
                None => leaves = Leaves::start(&borrowed, table.rows()),
            }
        }
        let Some(leaves) = leaves else {
            return Ok(Decision::Reference(Reason::Dtype));
        };
        Ok(match Gather::plan(kind, leaves, placement) {
            Ok(Planned::Alias) => Decision::Alias,
            Ok(Planned::View) => Decision::View,
            Ok(Planned::List) => Decision::List,
            // torch writes bools as 0 and 1 where it copies them one by one, whatever byte they had.
            Ok(Planned::Gather(gather)) if gather.moves_single_bools() => {
                Decision::Reference(Reason::Dtype)
            }
            Ok(Planned::Gather(gather)) => Decision::Gather(gather),
            Err(error) => Decision::Reference(error.into()),
        })
    }

    /// A field with a value that is no tensor: plain scalars, or lists.
    fn decide_values<'a>(
        &self,
        table: &Table<'_>,
        k: usize,
        kind: Kind,
        through: Through<'_>,
    ) -> PyResult<Decision<'a>> {
        for value in table.column(k) {
            let joined = matches!(kind, Kind::Flat { .. });
            if joined && !is_list(value) {
                return Ok(Decision::Reference(Reason::NotATensor));
            }
            if !through.passes_nested(value)? {
                let reason = if is_list(value) { Reason::Nested } else { Reason::NotATensor };
                return Ok(Decision::Reference(reason));
            }
        }
        Ok(match kind {
            Kind::Flat { dim: 0 } => Decision::Flatten,
            Kind::Flat { .. } => Decision::Reference(Reason::Dim),
            _ => Decision::List,
        })
    }

    fn collate<'py>(
        &self,
        call: &Call<'_, 'py>,
        table: &Table<'py>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let py = call.py;
        let decided = self.decide_all(call, table)?;
        let gathers: Vec<_> = decided.iter().filter_map(|field| field.decision.gather()).collect();
        let made = match gathers.is_empty() {
            true => None,
            false => buffer::make(py, &self.door, &gathers)?,
        };
        let mut made = made.into_iter().flatten();

        let batch = PyDict::new(py);
        for (k, Decided { through, decision, .. }) in decided.iter().enumerate() {
            let output = match decision {
                Decision::Alias => {
                    add(&COUNTERS.alias, 1);
                    through.pass(table.first(k))?
                }
                Decision::View => {
                    // `leaf[None]` is `leaf.unsqueeze(0)` without the look-up of a method.
                    match table.first(k).get_item(py.None()) {
                        Ok(view) => {
                            add(&COUNTERS.view, 1);
                            view
                        }
                        // The reference's attempt raises its own error.
                        Err(error) if error.is_instance_of::<PyException>(py) => {
                            self.reduce(call, table, k, Reason::NoPlainData)?
                        }
                        Err(error) => return Err(error),
                    }
                }
                Decision::List => {
                    add(&COUNTERS.list, 1);
                    let list = PyList::empty(py);
                    for value in table.column(k) {
                        list.append(through.pass(value)?)?;
                    }
                    list.into_any()
                }
                Decision::Flatten => {
                    add(&COUNTERS.list, 1);
                    let flat = PyList::empty(py);
                    for value in table.column(k) {
                        for inner in value.try_iter()? {
                            flat.append(through.pass(&inner?)?)?;
                        }
                    }
                    flat.into_any()
                }
                Decision::Gather(_) => match made.next() {
                    Some(tensor) => {
                        add(&COUNTERS.gather, 1);
                        tensor
                    }
                    None => self.reduce(call, table, k, Reason::NoMemory)?,
                },
                Decision::Reference(reason) => self.reduce(call, table, k, *reason)?,
            };
            batch.set_item(&table.keys[k], output)?;
        }
        add(&COUNTERS.batches, 1);
        add(&COUNTERS.items, table.rows() as u64);
        Ok(batch)
    }

    /// Hands one field to the reference.
    fn reduce<'py>(
        &self,
        call: &Call<'_, 'py>,
        table: &Table<'py>,
        k: usize,
        reason: Reason,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = call.py;
        COUNTERS.count_reference(reason);
        let key = &table.keys[k];
        let column = PyList::empty(py);
        for given in table.for_reference(k) {
            column.append(given)?;
        }
        self.reduce.bind(py).call1((
            key,
            &table.fields[k],
            column,
            call.device,
            call.pin_memory,
            reason.name(),
            call.context,
        ))
    }
}
