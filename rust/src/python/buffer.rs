//! Buffers: where a batch is gathered to, and the tensors carved out of them.
//!
//! A [`Buffer`] is one allocation. While it is filled it has one owner; [`carve`] then
//! shares it among the tensors made from it:
//!
//! ```text
//! tensor 0 ──> View ─┐
//! tensor 1 ──> View ─┼──> Arc<Allocation>: [segment 0 | padding | segment 1 | padding | …]
//! tensor k ──> View ─┘
//! ```
//!
//! Each tensor is a torch storage of its own that covers its own segment alone. Its deleter, which
//! torch may call on any thread and without the interpreter lock, drops its `View`; the last one
//! frees the allocation.

use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use super::exchange::{Door, Leaves, Table};
use super::reason::{Counters, add};
use crate::dlpack;
use crate::dtype::code;
use crate::error::PlanError;
use crate::gather::{self, Part, SegmentPtr};
use crate::memory::Allocation;
use crate::plan::{self, Kind, Moves, Output, Placement, Way};
use crate::shape::{self, Dims};
use crate::source::{Layouts, SourcePtr};

/// From this many bytes on, a gather lets other Python threads run. Below it, giving the lock up
/// and waiting for it again (up to a switch interval, 5 ms, when others are busy) costs more than
/// the copy, which takes some 50 us at this size.
pub(super) const DETACH_FROM: usize = 1 << 20;

/// Leaves and the output planned from exactly these; the leaves are alive for `'a`.
pub(super) struct Gather<'a> {
    output: Output,
    layouts: Layouts,
    sources: Vec<SourcePtr>,
    placement: Placement,
    _alive: PhantomData<&'a ()>,
}

impl<'a> Gather<'a> {
    /// Plans one field; a gather takes the leaves.
    pub(super) fn plan(
        kind: Kind,
        leaves: Leaves<'a>,
        placement: Placement,
    ) -> Result<Way<Box<Self>>, PlanError> {
        let way = plan::plan_field(kind, &leaves.layouts)?;
        let (layouts, sources) = leaves.into_parts();
        Ok(way.map(|output| {
            Box::new(Self { output, layouts, sources, placement, _alive: PhantomData })
        }))
    }

    /// What was planned, without the addresses.
    pub(super) fn into_plan(self) -> (Output, Layouts) {
        (self.output, self.layouts)
    }

    pub(super) fn output(&self) -> &Output {
        &self.output
    }

    pub(super) fn nbytes(&self) -> usize {
        self.output.nbytes
    }

    /// All of it, to be written from `segment` on.
    fn part(&self, segment: SegmentPtr) -> Part<'_> {
        let Self { output, sources, .. } = self;
        let range = 0..output.nbytes;
        let leaves = output.leaves_in(&range, sources.len());
        Part { output, sources: &sources[leaves], segment, range }
    }

    /// Whether torch would write the bytes as they are. Bools it may write as 0 and 1, whatever byte
    /// they had; where it does depends on strides, sizes and the number of threads.
    pub(super) fn keeps_bytes(&self) -> bool {
        if self.output.dtype.code != code::BOOL {
            return true;
        }
        self.layouts.all_contiguous()
            && self.sources.iter().enumerate().all(|(leaf, source)| {
                let nbytes = shape::byte_count(self.layouts.sizes(leaf), 1);
                // SAFETY: the leaf is contiguous, has these sizes and an item size of 1, and is
                // alive for `'a`.
                nbytes.is_ok_and(|nbytes| unsafe { source.holds_plain_bools(nbytes) })
            })
    }

    /// Whether the output's bytes lie in memory already, in order and without gaps, and are so many
    /// that a view (two small calls of torch's) costs less than a copy.
    pub(super) fn is_in_place(&self) -> bool {
        self.output.nbytes > COPY_UP_TO && gather::is_in_place(&self.output, &self.sources)
    }
}

/// Of a batch of up to this many bytes no view is made: making one takes as long as the copy, and
/// nobody has to know that small metadata shares memory with the items.
pub(super) const COPY_UP_TO: usize = 64 << 10;

/// Whether bools are moved otherwise than in whole contiguous leaves: torch writes them as 0 and 1
/// where it copies them one by one, whatever byte they had.
pub(super) fn moves_single_bools(output: &Output) -> bool {
    output.dtype.code == code::BOOL && matches!(output.moves, Moves::Blocks { .. })
}

/// Where each gather's output goes: which buffer, and the offset in it.
pub(super) struct Places {
    pub(super) places: Vec<(usize, usize)>,
    pub(super) buffers: Vec<usize>,
}

/// A kept field larger than this has a buffer of its own: allocating one costs little against the
/// copy, and whoever keeps a small tensor of the batch alive does not keep this one's bytes.
const SHARE_UP_TO: usize = 64 << 10;

/// Kept fields share one compact buffer, but for large ones. A field bound for the device gets its
/// own: whoever keeps its batch, or lets it go, decides about its bytes alone.
pub(super) fn place(gathers: &[&Gather<'_>]) -> Result<Places, PlanError> {
    let mut shared: Option<(usize, plan::Buffer)> = None;
    let mut buffers = Vec::with_capacity(gathers.len());
    let mut places = Vec::with_capacity(gathers.len());
    for gather in gathers {
        let nbytes = gather.output.nbytes;
        if gather.placement == Placement::Device || nbytes > SHARE_UP_TO {
            places.push((buffers.len(), 0));
            buffers.push(nbytes);
            continue;
        }
        let (at, segments) = shared.get_or_insert_with(|| {
            buffers.push(0);
            (buffers.len() - 1, plan::Buffer::default())
        });
        places.push((*at, segments.place(nbytes)?));
        buffers[*at] = segments.nbytes();
    }
    Ok(Places { places, buffers })
}

/// Gathers every field and returns its tensor, in order; `None` if the system has no memory.
///
/// The tensors are fresh: they share memory with no leaf.
pub(super) fn make<'py>(
    py: Python<'py>,
    door: &Door,
    gathers: &[&Gather<'_>],
    counters: &'static Counters,
) -> PyResult<Option<Vec<Bound<'py, PyAny>>>> {
    match door {
        Door::Table(table) => make_in_buffers(py, table, gathers, counters),
        Door::Attributes(attributes) => {
            let mut made = Vec::with_capacity(gathers.len());
            let mut segments = Vec::with_capacity(gathers.len());
            for gather in gathers {
                let (tensor, address) = attributes.empty(py, &gather.output)?;
                made.push(tensor);
                segments.push(SegmentPtr::new(address));
            }
            fill(py, gathers, segments, counters);
            Ok(Some(made))
        }
    }
}

fn make_in_buffers<'py>(
    py: Python<'py>,
    table: &Table,
    gathers: &[&Gather<'_>],
    counters: &'static Counters,
) -> PyResult<Option<Vec<Bound<'py, PyAny>>>> {
    let Ok(Places { places, buffers }) = place(gathers) else {
        return Ok(None);
    };
    let Some(buffers) = buffers.into_iter().map(Buffer::new).collect::<Option<Vec<_>>>() else {
        return Ok(None);
    };
    let segments = places.iter().map(|&(buffer, offset)| buffers[buffer].at(offset)).collect();
    fill(py, gathers, segments, counters);

    let shared: Vec<_> = buffers.into_iter().map(|buffer| Arc::new(buffer.allocation)).collect();
    let tensors = gathers.iter().zip(places).map(|(gather, (buffer, offset))| {
        carve(py, table, &shared[buffer], offset, &gather.output)
    });
    tensors.collect::<PyResult<_>>().map(Some)
}

/// Runs all gathers; `segments` has one address for each, in order, at which nobody else looks.
fn fill(
    py: Python<'_>,
    gathers: &[&Gather<'_>],
    segments: Vec<SegmentPtr>,
    counters: &'static Counters,
) {
    let total: usize = gathers.iter().map(|gather| gather.nbytes()).fold(0, usize::saturating_add);
    add(&counters.bytes_gathered, total as u64);
    if total < DETACH_FROM {
        for (gather, segment) in gathers.iter().zip(segments) {
            // SAFETY: (1) a `Gather` is planned from exactly its sources; (2) its leaves are
            // alive for `'a` and no Python code has run here since they were borrowed (for other
            // threads see the note in `source.rs`); (3) the segment was made for this output, and
            // nobody else looks at it.
            unsafe { gather::gather(&gather.output, &gather.sources, segment) };
        }
    } else {
        let parts: Vec<_> =
            gathers.iter().zip(segments).map(|(gather, segment)| gather.part(segment)).collect();
        py.detach(|| {
            static RUNNING: AtomicUsize = AtomicUsize::new(0);
            let running = RUNNING.fetch_add(1, Ordering::Relaxed) + 1;
            counters.detached_peak.fetch_max(running, Ordering::Relaxed);
            add(&counters.detached_gathers, 1);
            // SAFETY: as above; segments do not overlap.
            let shared = unsafe { gather::gather_parts(&parts) };
            add(&counters.shared_pieces, shared as u64);
            RUNNING.fetch_sub(1, Ordering::Relaxed);
        });
    }
}

/// A buffer that is being filled; nobody else can see it yet.
struct Buffer {
    allocation: Allocation,
}

/// What one tensor made from a buffer keeps alive. The managed tensor comes first, so that its
/// address is the view's.
#[repr(C)]
struct View {
    managed: dlpack::ManagedTensorVersioned,
    sizes: Dims,
    strides: Dims,
    _allocation: Arc<Allocation>,
}

impl Buffer {
    /// `None` if the system has no such memory.
    fn new(nbytes: usize) -> Option<Self> {
        Some(Self { allocation: Allocation::new(nbytes)? })
    }

    /// Address of the byte at `offset`, which must not lie beyond the buffer's end.
    fn at(&self, offset: usize) -> SegmentPtr {
        assert!(offset <= self.allocation.nbytes(), "a segment beyond its buffer");
        SegmentPtr::new(self.allocation.start().wrapping_add(offset))
    }
}

/// Makes the segment at `offset`, which must be filled, into a tensor.
///
/// # Errors
///
/// torch's own exception if it refuses.
fn carve<'py>(
    py: Python<'py>,
    table: &Table,
    allocation: &Arc<Allocation>,
    offset: usize,
    output: &Output,
) -> PyResult<Bound<'py, PyAny>> {
    let refused = |_| PyRuntimeError::new_err("mmcollate: sizes beyond what DLPack can say");
    // Everything that torch could object to is settled before it is called: on failure it does
    // not call the deleter, and freeing here what it may have taken would be worse than the leak.
    assert!(offset + output.nbytes <= allocation.nbytes(), "a segment beyond its buffer");
    let ndim = i32::try_from(output.sizes.len()).map_err(refused)?;
    let strides = shape::contiguous_strides(&output.sizes)
        .map_err(|_| PyRuntimeError::new_err("mmcollate: strides beyond 64 bits"))?;
    let data = match output.nbytes {
        0 => ptr::null_mut(),
        _ => allocation.start().wrapping_add(offset).cast::<c_void>(),
    };
    let mut view = Box::new(View {
        managed: dlpack::ManagedTensorVersioned {
            version: dlpack::Version { major: dlpack::MAJOR_VERSION, minor: 0 },
            manager_ctx: ptr::null_mut(),
            deleter: Some(release),
            flags: 0,
            tensor: dlpack::Tensor {
                data,
                device: dlpack::Device { device_type: dlpack::DEVICE_CPU, device_id: 0 },
                ndim,
                dtype: output.dtype,
                shape: ptr::null_mut(),
                strides: ptr::null_mut(),
                byte_offset: 0,
            },
        },
        sizes: output.sizes.clone(),
        strides,
        _allocation: Arc::clone(allocation),
    });
    // The view stays where it is from here on, so pointers into it are good.
    view.managed.tensor.shape = view.sizes.as_mut_ptr();
    view.managed.tensor.strides = view.strides.as_mut_ptr();
    let managed = Box::into_raw(view).cast::<dlpack::ManagedTensorVersioned>();
    let mut object: *mut c_void = ptr::null_mut();
    // SAFETY: attached (`py`); `managed` is a filled struct of this major version whose deleter
    // frees it, and torch takes it over.
    let code: c_int = unsafe { (table.to_py_object)(managed, &raw mut object) };
    if code != 0 {
        return Err(PyErr::fetch(py));
    }
    // SAFETY: torch returned 0, so `object` is a new reference to a tensor.
    unsafe { Bound::from_owned_ptr_or_err(py, object.cast()) }
}

/// # Safety
///
/// `managed` came from `Box::into_raw` of a [`View`] and is released once.
unsafe extern "C" fn release(managed: *mut dlpack::ManagedTensorVersioned) {
    // SAFETY: by the contract above; `managed` is the first field of a `repr(C)` view, so both
    // have the same address.
    drop(unsafe { Box::from_raw(managed.cast::<View>()) });
}
