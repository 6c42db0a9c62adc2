//! Walking items: from mappings of fields to one table of values.

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyInt, PyList, PyString};

use super::exchange::Door;
use super::guard::{Names, Torch};
use super::reason::Reason;
use super::values::is_scalar;
use crate::plan::Kind;

/// The classes of the three kinds of fields.
pub(super) struct FieldTypes {
    pub(super) batched: Py<PyAny>,
    pub(super) flat: Py<PyAny>,
    pub(super) shared: Py<PyAny>,
}

/// A field's declaration, read once for a batch.
pub(super) struct Declared {
    /// Or why only the reference knows what the field is.
    pub(super) kind: Result<Kind, Reason>,
    pub(super) keep_on_cpu: bool,
}

impl FieldTypes {
    /// Runs no Python code for a field of the three classes whose attributes are plain.
    pub(super) fn read(&self, names: &Names, field: &Bound<'_, PyAny>) -> PyResult<Declared> {
        let py = field.py();
        let class = field.get_type_ptr().cast();
        let kind = if class == self.batched.as_ptr() {
            Ok(Kind::Batched)
        } else if class == self.shared.as_ptr() {
            Ok(Kind::Shared)
        } else if class == self.flat.as_ptr() {
            let dim = field.getattr(names.dim.bind(py))?;
            let dim = dim.is_exact_instance_of::<PyInt>().then(|| dim.extract().ok()).flatten();
            dim.map(|dim| Kind::Flat { dim }).ok_or(Reason::Dim)
        } else {
            return Ok(Declared { kind: Err(Reason::FieldClass), keep_on_cpu: false });
        };
        let keep_on_cpu = field.getattr(names.keep_on_cpu.bind(py))?;
        // The truth of anything but a bool may be decided by code that does anything.
        if !keep_on_cpu.is_exact_instance_of::<PyBool>() {
            return Ok(Declared { kind: Err(Reason::FieldClass), keep_on_cpu: false });
        }
        Ok(Declared { kind, keep_on_cpu: keep_on_cpu.is_truthy()? })
    }

    /// Whether the reference compares this field's values between items: subclasses count.
    fn is_shared(&self, field: &Bound<'_, PyAny>) -> PyResult<bool> {
        let class = field.get_type_ptr().cast();
        if class == self.batched.as_ptr() || class == self.flat.as_ptr() {
            return Ok(false);
        }
        Ok(class == self.shared.as_ptr() || field.is_instance(self.shared.bind(field.py()))?)
    }
}

/// The two forms in which items come.
pub(super) enum Form {
    /// Objects whose attribute `data` is a dict of elements, each with `data` and `field`.
    Elements {
        /// The item's class, exactly.
        item: Py<PyAny>,
        /// The element's class, exactly.
        element: Py<PyAny>,
    },
    /// Mappings from name to value; what the fields are is said once for all.
    Plain {
        /// Makes a tensor of what counts as one (numpy arrays); called for values that are
        /// neither tensors nor plain scalars.
        normalize: Py<PyAny>,
        /// Raises the error for an item that can't be read.
        report: Py<PyAny>,
    },
}

/// Items that agree on their fields, as rows of values.
pub(super) struct Table<'py> {
    /// A copy of the first item: the names in order, and something under each, to be replaced.
    pub(super) names: Bound<'py, PyDict>,
    pub(super) columns: Vec<Column<'py>>,
    rows: usize,
    /// Number of shared fields among the columns.
    shared: usize,
    /// Row by row.
    values: Vec<Bound<'py, PyAny>>,
    /// The elements that the values are from, row by row; none if the items are plain mappings.
    elements: Vec<Bound<'py, PyAny>>,
}

/// One field of a table.
pub(super) struct Column<'py> {
    pub(super) key: Bound<'py, PyAny>,
    /// The first item's field: it decides for the batch.
    pub(super) field: Bound<'py, PyAny>,
    /// Whether an item declares another kind for this field than the first.
    pub(super) mixed: bool,
    shared: bool,
}

/// One field of one item.
struct Element<'py> {
    value: Bound<'py, PyAny>,
    field: Bound<'py, PyAny>,
    /// What both are from, for the reference.
    kept: Option<Bound<'py, PyAny>>,
}

/// What the next item is to the rows before it.
pub(super) enum Next {
    /// It belongs to them, and has become a row.
    Joined,
    /// It starts a new group.
    Differs,
    /// Only the reference's own comparison can tell.
    Unsure,
}

impl<'py> Table<'py> {
    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// The values of one field, item by item.
    pub(super) fn column(&self, k: usize) -> impl ExactSizeIterator<Item = &Bound<'py, PyAny>> {
        self.values.iter().skip(k).step_by(self.columns.len().max(1))
    }

    /// What the reference is given of one field: the elements, or of plain mappings the values.
    pub(super) fn column_for_reference(
        &self,
        k: usize,
        py: Python<'py>,
    ) -> PyResult<Bound<'py, PyList>> {
        let all = if self.elements.is_empty() { &self.values } else { &self.elements };
        let column = PyList::empty(py);
        for given in all.iter().skip(k).step_by(self.columns.len().max(1)) {
            column.append(given)?;
        }
        Ok(column)
    }

    /// The first item's value of one field.
    pub(super) fn first(&self, k: usize) -> &Bound<'py, PyAny> {
        &self.values[k]
    }
}

/// Whether two keys are the same string. Those of items that came through a message are equal, but
/// not the same object; to compare them costs a third of what looking one up does.
fn same_name(left: &Bound<'_, PyAny>, right: &Bound<'_, PyAny>) -> bool {
    if left.is(right) {
        return true;
    }
    let (Ok(left), Ok(right)) = (left.cast_exact::<PyString>(), right.cast_exact::<PyString>())
    else {
        return false;
    };
    // SAFETY: both are strings; comparing them runs no Python code, and fails only for those that
    // were never made ready, which no key of a dict is: it has been hashed.
    unsafe { ffi::PyUnicode_Compare(left.as_ptr(), right.as_ptr()) == 0 }
}

/// What walking needs: how items look, and what the fields are.
pub(super) struct Walker<'a, 'py> {
    pub(super) form: &'a Form,
    pub(super) types: &'a FieldTypes,
    pub(super) torch: &'a Torch,
    pub(super) door: &'a Door,
    /// Plain items' fields.
    pub(super) fields: Option<&'a Bound<'py, PyDict>>,
    /// Handed to `report`.
    pub(super) context: &'a Bound<'py, PyAny>,
}

impl<'py> Walker<'_, 'py> {
    /// The first item of a group; `None` if it is of another class than the form's.
    pub(super) fn first(
        &self,
        item: &Bound<'py, PyAny>,
        at: usize,
    ) -> PyResult<Option<Table<'py>>> {
        let Some(mapping) = self.mapping(item, at)? else {
            return Ok(None);
        };
        let mapping = match self.form {
            Form::Elements { .. } => mapping.copy()?,
            // It is a copy already.
            Form::Plain { .. } => mapping,
        };
        let width = mapping.len();
        let mut columns = Vec::with_capacity(width);
        let mut values = Vec::with_capacity(width);
        let mut elements = match self.form {
            Form::Elements { .. } => Vec::with_capacity(width),
            Form::Plain { .. } => Vec::new(),
        };
        for (key, element) in mapping.iter() {
            let Some(Element { value, field, kept }) = self.element(&key, element, at)? else {
                return Ok(None);
            };
            columns.push(Column { key, field, mixed: false, shared: false });
            values.push(value);
            elements.extend(kept);
        }
        // After the walk: a class of its own may decide what it is an instance of, in Python.
        let mut shared = 0;
        for column in &mut columns {
            column.shared = self.types.is_shared(&column.field)?;
            shared += usize::from(column.shared);
        }
        Ok(Some(Table { names: mapping, columns, rows: 1, shared, values, elements }))
    }

    /// Adds an item to the group if it belongs there. With `compare`, shared values must be equal
    /// and the kinds the same; without, a differing kind is noted.
    pub(super) fn next(
        &self,
        table: &mut Table<'py>,
        item: &Bound<'py, PyAny>,
        at: usize,
        compare: bool,
    ) -> PyResult<Next> {
        let Some(mapping) = self.mapping(item, at)? else {
            return Ok(Next::Unsure);
        };
        let width = table.columns.len();
        if mapping.len() != width {
            return Ok(Next::Differs);
        }
        let before = table.values.len();
        let joined = self.read_row(table, &mapping, at, compare);
        if !matches!(joined, Ok(Next::Joined)) {
            table.values.truncate(before);
            table.elements.truncate(before);
            return joined;
        }
        table.rows += 1;
        joined
    }

    fn read_row(
        &self,
        table: &mut Table<'py>,
        mapping: &Bound<'py, PyDict>,
        at: usize,
        compare: bool,
    ) -> PyResult<Next> {
        // Items of one model have their fields in one order; while that holds, no key is looked up.
        let mut lockstep = Some(mapping.iter());
        let Table { columns, values, elements, shared, .. } = table;
        let row_before = values.len() - columns.len();
        for (k, column) in columns.iter_mut().enumerate() {
            let in_order = lockstep.as_mut().and_then(|entries| entries.next());
            let element = match in_order {
                Some((key, element)) if same_name(&key, &column.key) => element,
                _ => {
                    lockstep = None;
                    match mapping.get_item(&column.key)? {
                        Some(element) => element,
                        None => return Ok(Next::Differs),
                    }
                }
            };
            let Some(Element { value, field, kept }) = self.element(&column.key, element, at)?
            else {
                return Ok(Next::Unsure);
            };
            let first = &column.field;
            if !field.is(first) && field.get_type_ptr() != first.get_type_ptr() {
                if compare {
                    // Which key comes first decides between "differs" and an exception of a
                    // shared value's comparison.
                    return Ok(if *shared > 0 { Next::Unsure } else { Next::Differs });
                }
                column.mixed = true;
            }
            if compare && column.shared {
                match self.shared_equal(&values[row_before + k], &value)? {
                    Some(true) => {}
                    // With one shared field there is no other that might raise before it.
                    Some(false) if *shared == 1 => return Ok(Next::Differs),
                    _ => return Ok(Next::Unsure),
                }
            }
            values.push(value);
            elements.extend(kept);
        }
        Ok(Next::Joined)
    }

    /// The item as a dict from names to elements; `None` if it is of another class.
    fn mapping(&self, item: &Bound<'py, PyAny>, at: usize) -> PyResult<Option<Bound<'py, PyDict>>> {
        let py = item.py();
        match self.form {
            Form::Elements { item: class, .. } => {
                if item.get_type_ptr().cast() != class.as_ptr() {
                    return Ok(None);
                }
                let data = item.getattr(self.torch.names.data.bind(py))?;
                Ok(data.cast_into_exact::<PyDict>().ok())
            }
            Form::Plain { .. } => {
                // A copy: values are normalized while it is walked, in Python.
                if let Ok(dict) = item.cast_exact::<PyDict>() {
                    return dict.copy().map(Some);
                }
                if item.is_instance(self.torch.mapping_type.bind(py))? {
                    let dict = PyDict::new(py);
                    for key in item.try_iter()? {
                        let key = key?;
                        dict.set_item(&key, item.get_item(&key)?)?;
                    }
                    return Ok(Some(dict));
                }
                Err(self.report("not_a_mapping", item, at, py.None().bind(py)))
            }
        }
    }

    /// The element's value and field; `None` if it is of another class.
    fn element(
        &self,
        key: &Bound<'py, PyAny>,
        element: Bound<'py, PyAny>,
        at: usize,
    ) -> PyResult<Option<Element<'py>>> {
        let py = element.py();
        match self.form {
            Form::Elements { element: class, .. } => {
                if element.get_type_ptr().cast() != class.as_ptr() {
                    return Ok(None);
                }
                let value = element.getattr(self.torch.names.data.bind(py))?;
                let field = element.getattr(self.torch.names.field.bind(py))?;
                Ok(Some(Element { value, field, kept: Some(element) }))
            }
            Form::Plain { normalize, .. } => {
                let field = self.fields.map(|fields| fields.get_item(key)).transpose()?.flatten();
                let Some(field) = field else {
                    return Err(self.report("unknown_field", &element, at, key));
                };
                let value = if self.torch.is_tensor(&element) || is_scalar(&element) {
                    element
                } else {
                    normalize.bind(py).call1((&element, key, at, self.context))?
                };
                Ok(Some(Element { value, field, kept: None }))
            }
        }
    }

    fn report(
        &self,
        what: &str,
        item: &Bound<'py, PyAny>,
        at: usize,
        key: &Bound<'py, PyAny>,
    ) -> PyErr {
        let py = item.py();
        let Form::Plain { report, .. } = self.form else {
            return PyTypeError::new_err("mmcollate: an item that can't be read");
        };
        match report.bind(py).call1((what, item, at, key, self.context)) {
            Ok(error) => PyErr::from_value(error),
            Err(error) => error,
        }
    }

    /// Whether two shared values are equal, where that can be said without running any code that
    /// may raise; `None` otherwise. As in the reference, a NaN is never equal, not even to itself.
    fn shared_equal(
        &self,
        left: &Bound<'py, PyAny>,
        right: &Bound<'py, PyAny>,
    ) -> PyResult<Option<bool>> {
        if is_scalar(left) && is_scalar(right) {
            return left.eq(right).map(Some);
        }
        let (Some(left), Some(right)) = (self.torch.tensor(left), self.torch.tensor(right)) else {
            return Ok(None);
        };
        let (Some(a), Some(b)) = (self.door.borrow(left), self.door.borrow(right)) else {
            return Ok(None);
        };
        Ok(a.same_whole_numbers(&b))
    }
}
