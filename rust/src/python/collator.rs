//! One batch, from items to outputs: walk, decide, gather, hand the rest to the reference.

use pyo3::exceptions::{PyException, PyOverflowError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyList, PyString};
use smallvec::smallvec;

use super::buffer::{self, Gather};
use super::device::{DevicePlan, Load, Loads};
use super::exchange::{Borrowed, Door, Leaves};
use super::guard::{self, Torch};
use super::items::{Column, Declared, FieldTypes, Form, Next, Table, Walker};
use super::reason::{COUNTERS, Counters, Reason, UNHEARD, add};
use super::values::{MAX_DEPTH, Through, To, is_list, is_scalar};
use crate::plan::{self, Kind, Placement, Way};
use crate::shape::{self, Dims};

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

/// What the core makes of one field.
enum Made<'a> {
    /// A batch where the values are.
    Here(Way<Box<Gather<'a>>>),
    /// A view over leaves that lie side by side; the reference's if they give none.
    Adjacent(Box<Gather<'a>>),
    /// Tensors on a device.
    There(Loads),
}

/// What becomes of one field: the core's way, or why the reference takes it.
type Decision<'a> = Result<Made<'a>, Reason>;

/// A field as it is decided about.
#[derive(Clone, Copy)]
struct Field<'a> {
    k: usize,
    kind: Kind,
    placement: Placement,
    through: Through<'a>,
}

/// A field's decision, with what carrying it out needs.
struct Decided<'a> {
    /// Whether lists are joined into one.
    flat: bool,
    keep_on_cpu: bool,
    through: Through<'a>,
    decision: Decision<'a>,
}

impl<'a> Decided<'a> {
    fn is_adjacent(&self) -> bool {
        matches!(self.decision, Ok(Made::Adjacent(_)))
    }

    fn gather(&self) -> Option<&Gather<'a>> {
        match &self.decision {
            Ok(Made::Here(Way::Gather(gather))) => Some(gather),
            _ => None,
        }
    }

    /// Bytes that are written for this field.
    fn nbytes(&self) -> usize {
        match &self.decision {
            Ok(Made::Here(Way::Gather(gather))) => gather.output().nbytes,
            Ok(Made::There(Loads { loads, .. })) => {
                loads.iter().map(|load| load.output.nbytes).fold(0, usize::saturating_add)
            }
            _ => 0,
        }
    }

    /// The way, and why if it is the reference's.
    fn named(&self) -> (&'static str, &'static str) {
        match &self.decision {
            Ok(Made::Here(Way::Alias)) => ("alias", ""),
            Ok(Made::Here(Way::View) | Made::Adjacent(_)) => ("view", ""),
            Ok(Made::Here(Way::List)) => ("list", ""),
            Ok(Made::Here(Way::Gather(_))) => ("gather", ""),
            Ok(Made::There(_)) => ("stage", ""),
            Err(reason) => ("reference", reason.name()),
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
    /// `can_batch(left, right, fields, context, index of right)`: the reference's comparison of
    /// two items.
    can_batch: Py<PyAny>,
    /// Whether large leaves that lie side by side are not copied.
    alias: bool,
    counters: &'static Counters,
}

#[pymethods]
impl Collator {
    /// Of items whose attribute `data` is a dict of elements with `data` and `field`.
    #[staticmethod]
    #[pyo3(signature = (*, item, element, batched, flat, shared, reduce, can_batch, only_device_contexts, skip_table=false, alias=false, counted=true))]
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
        alias: bool,
        counted: bool,
    ) -> PyResult<Self> {
        let types = FieldTypes { batched, flat, shared };
        let form = Form::Elements { item, element };
        Self::new(
            py,
            form,
            types,
            reduce,
            can_batch,
            only_device_contexts,
            skip_table,
            alias,
            counted,
        )
    }

    /// Of mappings from name to value.
    #[staticmethod]
    #[pyo3(signature = (*, normalize, report, batched, flat, shared, reduce, can_batch, only_device_contexts, skip_table=false, counted=true))]
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
        counted: bool,
    ) -> PyResult<Self> {
        let types = FieldTypes { batched, flat, shared };
        let form = Form::Plain { normalize, report };
        Self::new(
            py,
            form,
            types,
            reduce,
            can_batch,
            only_device_contexts,
            skip_table,
            false,
            counted,
        )
    }

    /// Collates the group that starts at `start`; it ends before `stop` at the latest. Returns the
    /// index after its last item, and its batch: `None` if only the reference can make it. With
    /// `staging`, fields that are bound for the device are `None` in the batch where the plan that
    /// comes third has them.
    #[allow(clippy::too_many_arguments, clippy::type_complexity)]
    fn next_group<'py>(
        slf: &Bound<'py, Self>,
        py: Python<'py>,
        items: &Bound<'py, PyAny>,
        start: usize,
        stop: usize,
        fields: Option<&Bound<'py, PyDict>>,
        device: &Bound<'py, PyAny>,
        pin_memory: &Bound<'py, PyAny>,
        context: &Bound<'py, PyAny>,
        staging: bool,
    ) -> PyResult<(usize, Option<Bound<'py, PyDict>>, Option<DevicePlan>)> {
        let this = slf.get();
        let one = stop.saturating_sub(start) == 1;
        let call = Call::new(this, py, device, pin_memory, context, staging, one)?;
        let (end, table) = this.walk_group(&call, items, start, stop, fields)?;
        let Some(table) = table else {
            this.counters.count_reference(Reason::ItemClass);
            return Ok((end, None, None));
        };
        let (batch, plan) = Self::collate(slf, &call, &table)?;
        Ok((end, Some(batch), plan))
    }

    /// Collates all items into one batch, as they are: as `next_group`, without the end.
    #[allow(clippy::type_complexity)]
    fn batch<'py>(
        slf: &Bound<'py, Self>,
        py: Python<'py>,
        items: &Bound<'py, PyAny>,
        device: &Bound<'py, PyAny>,
        pin_memory: &Bound<'py, PyAny>,
        staging: bool,
    ) -> PyResult<(Option<Bound<'py, PyDict>>, Option<DevicePlan>)> {
        let this = slf.get();
        let context = py.None().into_bound(py);
        let call = Call::new(this, py, device, pin_memory, &context, staging, false)?;
        let walker = this.walker(None, &context);
        let mut table: Option<Table<'py>> = None;
        for (at, item) in items.try_iter()?.enumerate() {
            let item = item?;
            match &mut table {
                None => table = walker.first(&item, at)?,
                Some(rows) => match walker.next(rows, &item, at, false)? {
                    Next::Joined => {}
                    Next::Differs | Next::Unsure => table = None,
                },
            }
            if table.is_none() {
                this.counters.count_reference(Reason::ItemClass);
                return Ok((None, None));
            }
        }
        let Some(table) = table else {
            return Ok((Some(PyDict::new(py)), None));
        };
        let (batch, plan) = Self::collate(slf, &call, &table)?;
        Ok((Some(batch), plan))
    }

    /// What `next_group` would do, without doing it: the end of the group; for each field
    /// `(name, placement, way, bytes, buffer, offset, reason)`, `None` where the reference would
    /// take the whole group; and the plan of what is bound for the device.
    #[allow(clippy::type_complexity, clippy::too_many_arguments)]
    fn explain_group<'py>(
        slf: &Bound<'py, Self>,
        py: Python<'py>,
        items: &Bound<'py, PyAny>,
        start: usize,
        stop: usize,
        fields: Option<&Bound<'py, PyDict>>,
        device: &Bound<'py, PyAny>,
        pin_memory: &Bound<'py, PyAny>,
        context: &Bound<'py, PyAny>,
        staging: bool,
    ) -> PyResult<(usize, Option<Bound<'py, PyList>>, Option<DevicePlan>)> {
        let this = slf.get();
        let one = stop.saturating_sub(start) == 1;
        let call = Call::new(this, py, device, pin_memory, context, staging, one)?;
        let (end, table) = this.walk_group(&call, items, start, stop, fields)?;
        let Some(table) = table else {
            return Ok((end, None, None));
        };
        let mut decided = this.decide_all(&call, &table)?;
        let mut views = this.views(&table, &decided).into_iter();
        for field in &mut decided {
            if field.is_adjacent() && views.next().flatten().is_none() {
                field.decision = Err(Reason::SideBySide);
            }
        }
        let gathers: Vec<_> = decided.iter().filter_map(Decided::gather).collect();
        // Without the table each tensor is an allocation of torch's.
        let places = if this.door.has_table() {
            let places = buffer::place(&gathers);
            places.map_err(|error| PyOverflowError::new_err(error.to_string()))?.places
        } else {
            Vec::new()
        };
        let mut places = places.into_iter();
        let report = PyList::empty(py);
        for (column, field) in table.columns.iter().zip(&decided) {
            let placement = if field.keep_on_cpu { "cpu" } else { "device" };
            let place = field.gather().and_then(|_| places.next());
            let (buffer, offset) = place.unzip();
            let (way, reason) = field.named();
            report.append((&column.key, placement, way, field.nbytes(), buffer, offset, reason))?;
        }
        let mut plan: Option<DevicePlan> = None;
        for (k, field) in decided.into_iter().enumerate() {
            if let Ok(Made::There(Loads { loads, .. })) = field.decision {
                let plan = match &mut plan {
                    Some(plan) => plan,
                    None => plan.insert(Self::device_plan(slf, &call)?),
                };
                plan.push(&table, k, loads)?;
            }
        }
        Ok((end, Some(report), plan))
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
    /// Whether fields that are bound for the device are planned, and not left to the reference.
    staging: bool,
    /// Set if every field goes to the reference.
    all_reference: Option<Reason>,
}

impl<'a, 'py> Call<'a, 'py> {
    /// `one`: whether there is a single item.
    fn new(
        collator: &Collator,
        py: Python<'py>,
        device: &'a Bound<'py, PyAny>,
        pin_memory: &'a Bound<'py, PyAny>,
        context: &'a Bound<'py, PyAny>,
        staging: bool,
        one: bool,
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
        // Of one item that stays where it is nothing is read or written here: torch makes its
        // views. What goes to the host is moved by the reference, if only in name.
        let observed = if one && target == Target::AsIs {
            collator.torch.calls_are_observed(py)?
        } else {
            collator.torch.is_observed(py)?
        };
        let all_reference = if observed {
            Some(Reason::TorchMode)
        } else if pin_memory.is_exact_instance_of::<PyBool>() {
            None
        } else {
            Some(Reason::PinType)
        };
        let pinned = all_reference.is_none() && pin_memory.is_truthy()?;
        Ok(Self { py, device, pin_memory, context, target, pinned, staging, all_reference })
    }
}

impl Collator {
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        form: Form,
        types: FieldTypes,
        reduce: Py<PyAny>,
        can_batch: Py<PyAny>,
        only_device_contexts: Py<PyAny>,
        skip_table: bool,
        alias: bool,
        counted: bool,
    ) -> PyResult<Self> {
        let torch = py.import("torch")?;
        Ok(Self {
            form,
            types,
            torch: Torch::new(&torch, only_device_contexts)?,
            door: Door::open(&torch, skip_table)?,
            reduce,
            can_batch,
            alias,
            counters: if counted { &COUNTERS } else { &UNHEARD },
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
        let mut table = walker.first(&left, start)?;
        let mut end = start + 1;
        while end < stop && end < items.len()? {
            let right = items.get_item(end)?;
            let next = match &mut table {
                Some(rows) if call.all_reference.is_none() => {
                    walker.next(rows, &right, end, true)?
                }
                _ => Next::Unsure,
            };
            match next {
                Next::Joined => {}
                Next::Differs => break,
                Next::Unsure => {
                    let can_batch = self.can_batch.bind(call.py);
                    if !can_batch.call1((&left, &right, fields, call.context, end))?.is_truthy()? {
                        break;
                    }
                    if let Some(rows) = &mut table
                        && !matches!(walker.next(rows, &right, end, false)?, Next::Joined)
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
        let mut decided = Vec::with_capacity(table.columns.len());
        // All declarations before the first leaf is borrowed: from then on no Python code runs
        // until the gather has read it.
        let mut declared = Vec::with_capacity(table.columns.len());
        for column in &table.columns {
            declared.push(self.types.read(&self.torch.names, &column.field)?);
        }
        for (k, declared) in declared.into_iter().enumerate() {
            decided.push(self.decide(call, table, k, declared, &mut grad_enabled)?);
        }
        Ok(decided)
    }

    /// Decides about one field.
    fn decide<'a>(
        &'a self,
        call: &Call<'_, '_>,
        table: &'a Table<'_>,
        k: usize,
        declared: Declared,
        grad_enabled: &mut Option<bool>,
    ) -> PyResult<Decided<'a>> {
        // What is kept goes to the host whatever device is asked for.
        let to = match call.target {
            Target::AsIs => To::Nowhere,
            Target::Cpu => To::Cpu,
            Target::Device if declared.keep_on_cpu => To::Cpu,
            Target::Device => To::Device,
        };
        let through = Through { torch: &self.torch, to };
        let decision = match (call.all_reference, declared.kind) {
            (Some(reason), _) | (None, Err(reason)) => Err(reason),
            _ if table.columns[k].mixed => Err(Reason::MixedKinds),
            _ if to == To::Device && !call.staging => Err(Reason::DeviceTarget),
            (None, Ok(kind)) => {
                let placement =
                    if declared.keep_on_cpu { Placement::Cpu } else { Placement::Device };
                let field = Field { k, kind, placement, through };
                if to == To::Device {
                    self.decide_there(call, table, field, grad_enabled)?
                } else {
                    let way = self.decide_here(call, table, field, grad_enabled)?;
                    way.map(|way| match way {
                        Way::Gather(gather) if self.alias && gather.is_in_place() => {
                            Made::Adjacent(gather)
                        }
                        way => Made::Here(way),
                    })
                }
            }
        };
        let flat = matches!(declared.kind, Ok(Kind::Flat { .. }));
        Ok(Decided { flat, keep_on_cpu: declared.keep_on_cpu, through, decision })
    }

    fn decide_here<'a>(
        &self,
        call: &Call<'_, '_>,
        table: &'a Table<'_>,
        field: Field<'_>,
        grad_enabled: &mut Option<bool>,
    ) -> PyResult<Result<Way<Box<Gather<'a>>>, Reason>> {
        let Field { k, kind, placement, through } = field;
        let first = table.first(k);
        let is_tensor = self.torch.is_tensor(first);
        if let Some(way) = plan::plan_unread(kind, table.rows())
            && (is_tensor || kind == Kind::Shared)
        {
            // Where nothing moves, any value passes.
            return Ok(if through.to == To::Nowhere || through.passes_nested(first)? {
                Ok(way)
            } else {
                Err(through.why_not(first))
            });
        }
        if !is_tensor {
            return self.decide_values(table, field);
        }
        if call.pinned && call.target == Target::AsIs && placement == Placement::Device {
            return Ok(Err(Reason::Pinned));
        }
        let grad_enabled = self.grad_enabled(call, grad_enabled)?;
        self.decide_tensors(table, field, grad_enabled)
    }

    fn grad_enabled(&self, call: &Call<'_, '_>, known: &mut Option<bool>) -> PyResult<bool> {
        match *known {
            Some(known) => Ok(known),
            None => Ok(*known.insert(self.torch.is_grad_enabled(call.py)?)),
        }
    }

    /// A field whose first value is a tensor, of several items.
    fn decide_tensors<'a>(
        &self,
        table: &'a Table<'_>,
        field: Field<'_>,
        grad_enabled: bool,
    ) -> PyResult<Result<Way<Box<Gather<'a>>>, Reason>> {
        let Field { k, kind, placement, through } = field;
        let mut leaves: Option<Leaves<'a>> = None;
        for leaf in table.column(k) {
            let Some(tensor) = self.torch.tensor(leaf) else {
                // Only a list of tensors alone is stacked or concatenated.
                return if kind == Kind::Batched && (is_scalar(leaf) || is_list(leaf)) {
                    self.decide_values(table, field)
                } else {
                    Ok(Err(Reason::MixedLeaves))
                };
            };
            if kind == Kind::Batched
                && leaves.as_ref().is_some_and(|leaves| !leaves.layouts.uniform())
            {
                // A ragged list is what it is, whatever else its leaves are.
                if !through.passes(leaf)? {
                    return Ok(Err(Reason::NotOnCpu));
                }
                continue;
            }
            let Some(borrowed) = self.door.borrow(tensor) else {
                return Ok(Err(Reason::NoPlainData));
            };
            if leaves.as_mut().is_some_and(|leaves| leaves.push_alike(&borrowed)) {
                continue;
            }
            let checked = guard::check(&self.door, &self.torch, tensor, borrowed, grad_enabled)?;
            let borrowed = match checked {
                Ok(borrowed) => borrowed,
                Err(reason) => return Ok(Err(reason)),
            };
            match &mut leaves {
                Some(leaves) if borrowed.dtype() != leaves.layouts.dtype() => {
                    return Ok(Err(Reason::MixedDtypes));
                }
                Some(leaves) => leaves.push(&borrowed),
                None => {
                    let simple = guard::layout_decides(&self.door, &borrowed, grad_enabled);
                    leaves = Leaves::start(&borrowed, table.rows(), simple);
                }
            }
        }
        let Some(leaves) = leaves else {
            return Ok(Err(Reason::Dtype));
        };
        Ok(match Gather::plan(kind, leaves, placement) {
            Ok(Way::Gather(gather)) if !gather.keeps_bytes() => Err(Reason::Dtype),
            Ok(way) => Ok(way),
            Err(error) => Err(error.into()),
        })
    }

    /// A field with a value that is no tensor: plain scalars, or lists.
    fn decide_values<'a>(
        &self,
        table: &Table<'_>,
        field: Field<'_>,
    ) -> PyResult<Result<Way<Box<Gather<'a>>>, Reason>> {
        let Field { k, kind, through, .. } = field;
        for value in table.column(k) {
            let joined = matches!(kind, Kind::Flat { .. });
            if joined && !is_list(value) {
                return Ok(Err(Reason::NotATensor));
            }
            if !through.passes_nested(value)? {
                return Ok(Err(through.why_not(value)));
            }
        }
        Ok(plan::plan_values(kind).ok_or(Reason::Dim))
    }

    /// A field that is bound for a device.
    fn decide_there<'a>(
        &self,
        call: &Call<'_, '_>,
        table: &'a Table<'_>,
        field: Field<'_>,
        grad_enabled: &mut Option<bool>,
    ) -> PyResult<Result<Made<'a>, Reason>> {
        let Field { k, kind, .. } = field;
        let known = &mut *grad_enabled;
        let alone = |load: Load| Made::There(Loads { list: None, loads: vec![load] });
        let first = table.first(k);
        if self.torch.is_tensor(first) {
            let grad_enabled = self.grad_enabled(call, known)?;
            if let Some(way) = plan::plan_unread::<()>(kind, table.rows()) {
                let leading = matches!(way, Way::View);
                return Ok(self.load(first, leading, grad_enabled, None)?.map(alone));
            }
            // Read where they are: whether they pass is not the question.
            let through = Through { torch: &self.torch, to: To::Nowhere };
            match self.decide_tensors(table, Field { through, ..field }, grad_enabled)? {
                Err(reason) => return Ok(Err(reason)),
                Ok(Way::Gather(gather)) => {
                    let (output, layouts) = gather.into_plan();
                    let leaves = table.column(k).map(|leaf| leaf.clone().unbind()).collect();
                    return Ok(Ok(alone(Load { output, layouts, leaves, home: None })));
                }
                Ok(_) => {}
            }
        }
        let values = if kind == Kind::Shared { 1 } else { table.rows() };
        let mut nest = Nest {
            collator: self,
            grad_enabled: self.grad_enabled(call, known)?,
            // Mostly one tensor for each.
            loads: Vec::with_capacity(values),
        };
        let list = PyList::empty(call.py);
        for value in table.column(k).take(values) {
            let added = match kind {
                Kind::Flat { dim: 0 } if is_list(value) => nest.extend(&list, value, 0)?,
                Kind::Flat { dim: 0 } => Err(Reason::NotATensor),
                Kind::Flat { .. } => Err(Reason::Dim),
                _ => nest.append(&list, value, 0)?,
            };
            if let Err(reason) = added {
                return Ok(Err(reason));
            }
        }
        if nest.loads.is_empty() {
            // Nothing goes anywhere.
            return Ok(self.decide_here(call, table, field, grad_enabled)?.map(Made::Here));
        }
        let list = if kind == Kind::Shared { list.get_item(0)? } else { list.into_any() };
        Ok(Ok(Made::There(Loads { list: Some(list.unbind()), loads: nest.loads })))
    }

    /// One leaf that goes to a device by itself, and to its home in the batch.
    fn load(
        &self,
        leaf: &Bound<'_, PyAny>,
        leading: bool,
        grad_enabled: bool,
        home: Option<(&Bound<'_, PyList>, usize)>,
    ) -> PyResult<Result<Load, Reason>> {
        let Some(tensor) = self.torch.tensor(leaf) else {
            return Ok(Err(Reason::NotATensor));
        };
        let borrowed = match guard::readable(&self.door, &self.torch, tensor, grad_enabled)? {
            Ok(borrowed) => borrowed,
            Err(reason) => return Ok(Err(reason)),
        };
        let Some(layouts) = borrowed.layouts() else {
            return Ok(Err(Reason::Dtype));
        };
        Ok(match plan::plan_dense(&layouts, leading) {
            Ok(output) if buffer::moves_single_bools(&output) => Err(Reason::Dtype),
            Ok(output) => {
                let home = home.map(|(list, at)| (list.clone().unbind(), at));
                Ok(Load { output, layouts, leaves: smallvec![leaf.clone().unbind()], home })
            }
            Err(error) => Err(error.into()),
        })
    }

    /// Borrows an object, if it is a plain tensor with plain data.
    pub(super) fn borrow<'a>(&self, object: &'a Bound<'_, PyAny>) -> Option<Borrowed<'a>> {
        self.door.borrow(self.torch.tensor(object)?)
    }

    fn collate<'py>(
        slf: &Bound<'py, Self>,
        call: &Call<'_, 'py>,
        table: &Table<'py>,
    ) -> PyResult<(Bound<'py, PyDict>, Option<DevicePlan>)> {
        let py = call.py;
        let this = slf.get();
        let decided = this.decide_all(call, table)?;
        let gathers: Vec<_> = decided.iter().filter_map(Decided::gather).collect();
        let made = match gathers.is_empty() {
            true => None,
            false => buffer::make(py, &this.door, &gathers, this.counters)?,
        };
        drop(gathers);
        let mut made = made.into_iter().flatten();
        let mut views = this.views(table, &decided).into_iter();

        // Filled in place: a fresh dict would grow several times on its way to a dozen names.
        let batch = table.names.clone();
        let mut plan: Option<DevicePlan> = None;
        for (k, field) in decided.into_iter().enumerate() {
            let output = match field.decision {
                Ok(Made::Here(Way::Alias)) => {
                    add(&this.counters.alias, 1);
                    field.through.pass(table.first(k))?
                }
                Ok(Made::Here(Way::View)) => {
                    // `leaf[None]` is `leaf.unsqueeze(0)` without the look-up of a method.
                    match table.first(k).get_item(py.None()) {
                        Ok(view) => {
                            add(&this.counters.view, 1);
                            view
                        }
                        // The reference's attempt raises its own error.
                        Err(error) if error.is_instance_of::<PyException>(py) => {
                            this.reduce(call, table, k, Reason::NoPlainData)?
                        }
                        Err(error) => return Err(error),
                    }
                }
                Ok(Made::Here(Way::List)) => {
                    add(&this.counters.list, 1);
                    list_of(table.column(k), field.flat, field.through, py)?.into_any()
                }
                Ok(Made::Here(Way::Gather(_))) => match made.next() {
                    Some(tensor) => {
                        add(&this.counters.gather, 1);
                        tensor
                    }
                    None => this.reduce(call, table, k, Reason::NoMemory)?,
                },
                Ok(Made::Adjacent(_)) => match views.next().flatten() {
                    Some(view) => {
                        add(&this.counters.view, 1);
                        view
                    }
                    None => this.reduce(call, table, k, Reason::SideBySide)?,
                },
                Ok(Made::There(Loads { list, loads })) => {
                    let plan = match &mut plan {
                        Some(plan) => plan,
                        None => plan.insert(Self::device_plan(slf, call)?),
                    };
                    plan.push(table, k, loads)?;
                    list.unwrap_or_else(|| py.None()).into_bound(py)
                }
                Err(reason) => this.reduce(call, table, k, reason)?,
            };
            batch.set_item(&table.columns[k].key, output)?;
        }
        add(&this.counters.batches, 1);
        add(&this.counters.items, table.rows() as u64);
        Ok((batch, plan))
    }

    /// For each field whose leaves lie side by side, a view over them if they give one.
    ///
    /// Runs code of torch's, so no address that was borrowed may be used after it.
    fn views<'py>(
        &self,
        table: &Table<'py>,
        decided: &[Decided<'_>],
    ) -> Vec<Option<Bound<'py, PyAny>>> {
        let adjacent = decided.iter().enumerate().filter_map(|(k, field)| match &field.decision {
            Ok(Made::Adjacent(gather)) => Some((k, &gather.output().sizes)),
            _ => None,
        });
        let view = |(k, sizes): (usize, &Dims)| {
            let strides = shape::contiguous_strides(sizes).ok()?;
            let last = table.column(k).last()?;
            // Where torch refuses, the reference's attempt raises its own error.
            self.torch.view_over(table.first(k), last, sizes, &strides).ok().flatten()
        };
        adjacent.map(view).collect()
    }

    /// A plan without fields.
    fn device_plan(slf: &Bound<'_, Self>, call: &Call<'_, '_>) -> PyResult<DevicePlan> {
        slf.get().torch.prepare_to_carve(call.py)?;
        Ok(DevicePlan {
            collator: slf.clone().unbind(),
            device: call.device.clone().unbind(),
            pin_memory: call.pin_memory.clone().unbind(),
            context: call.context.clone().unbind(),
            fields: Vec::new(),
            loads: Vec::new(),
            layout: None,
        })
    }

    /// Hands one field to the reference.
    fn reduce<'py>(
        &self,
        call: &Call<'_, 'py>,
        table: &Table<'py>,
        k: usize,
        reason: Reason,
    ) -> PyResult<Bound<'py, PyAny>> {
        let Call { py, device, pin_memory, context, .. } = *call;
        let column = table.column_for_reference(k, py)?;
        let Column { key, field, .. } = &table.columns[k];
        self.call_reference(py, key, field, &column, device, pin_memory, reason, context)
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn call_reference<'py>(
        &self,
        py: Python<'py>,
        key: &Bound<'py, PyAny>,
        field: &Bound<'py, PyAny>,
        column: &Bound<'py, PyList>,
        device: &Bound<'py, PyAny>,
        pin_memory: &Bound<'py, PyAny>,
        reason: Reason,
        context: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.counters.count_reference(reason);
        let arguments = (key, field, column, device, pin_memory, reason.name(), context);
        self.reduce.bind(py).call1(arguments)
    }

    pub(super) fn torch(&self) -> &Torch {
        &self.torch
    }

    pub(super) fn counters(&self) -> &'static Counters {
        self.counters
    }
}

/// Values rebuilt as the reference rebuilds them, with the tensors left out and noted as loads.
struct Nest<'a> {
    collator: &'a Collator,
    grad_enabled: bool,
    loads: Vec<Load>,
}

impl Nest<'_> {
    /// Appends what a list holds.
    fn extend<'py>(
        &mut self,
        list: &Bound<'py, PyList>,
        values: &Bound<'py, PyAny>,
        depth: usize,
    ) -> PyResult<Result<(), Reason>> {
        for value in values.try_iter()? {
            if let Err(reason) = self.append(list, &value?, depth)? {
                return Ok(Err(reason));
            }
        }
        Ok(Ok(()))
    }

    /// Appends a value: `None` for a tensor, a list rebuilt, anything else as it is.
    fn append<'py>(
        &mut self,
        list: &Bound<'py, PyList>,
        value: &Bound<'py, PyAny>,
        depth: usize,
    ) -> PyResult<Result<(), Reason>> {
        let py = value.py();
        if self.collator.torch.is_tensor(value) {
            let home = Some((list, list.len()));
            match self.collator.load(value, false, self.grad_enabled, home)? {
                Ok(load) => {
                    self.loads.push(load);
                    list.append(py.None())?;
                }
                Err(reason) => return Ok(Err(reason)),
            }
        } else if is_scalar(value) {
            list.append(value)?;
        } else if value.is_exact_instance_of::<PyList>() && depth < MAX_DEPTH {
            let inner = PyList::empty(py);
            if let Err(reason) = self.extend(&inner, value, depth + 1)? {
                return Ok(Err(reason));
            }
            list.append(inner)?;
        } else {
            // A tuple can't be filled in later.
            let through = Through { torch: &self.collator.torch, to: To::Device };
            if !is_list(value) || !through.passes_nested(value)? {
                return Ok(Err(through.why_not(value)));
            }
            list.append(through.pass(value)?)?;
        }
        Ok(Ok(()))
    }
}

/// The values in a new list, or what they hold if lists are joined.
fn list_of<'b, 'py: 'b>(
    values: impl Iterator<Item = &'b Bound<'py, PyAny>>,
    joined: bool,
    through: Through<'_>,
    py: Python<'py>,
) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for value in values {
        if joined {
            for inner in value.try_iter()? {
                list.append(through.pass(&inner?)?)?;
            }
        } else {
            list.append(through.pass(value)?)?;
        }
    }
    Ok(list)
}
