//! Memory for results: who owns it, and where it comes from.
//!
//! ```text
//!                smaller than LARGE   LARGE and more
//! comes from     the allocator        the warm pool, the allocator if it has a block with its
//!                                     pages, else fresh huge pages
//! goes back to   the allocator        where it came from; huge pages to the warm pool if they fit
//!                                     there, else to the system
//! ```
//!
//! The C library maps large blocks afresh each time, and to fault these in, 4 KiB by 4 KiB, takes
//! longer than the copy. Pages of 2 MiB make that cheap and keep nothing. A warm block saves the
//! rest, at the price of memory that is kept: hence with a cap, and off unless one is set.
//!
//! Now and then a heap has a free block that is large enough and still has its pages. That one is
//! taken: to join 77 MB, the C library's own results were 1.4 times as fast there as huge pages.
//!
//! An allocator that keeps large blocks by itself, as tcmalloc does, gets all of them: its memory
//! is warm already, and 1.4 times as fast as fresh huge pages.

use std::alloc::{Layout, alloc, dealloc};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::thread;

use crate::align::SEGMENT_ALIGN;

/// From this many bytes on, results have mappings of their own.
///
/// 32 MiB is where glibc starts to map each block. Below, it hands out warm memory once the process
/// has run for a while, and fresh huge pages lose. To join 8 tensors, in ms (Zen 4, a VM, medians):
///
/// | MB | 16 | 24 | 30 | 40 | 77 | 300 |
/// |---|---|---|---|---|---|---|
/// | glibc | 3.8 | 6.5 | 7.1 | 45 | 90 | 303 |
/// | huge pages | 7.3 | 9.2 | 9.4 | 12 | 23 | 80 |
/// | a warm block | 3.4 | 6.3 | 6.0 | 8.1 | 16 | 54 |
pub const LARGE: usize = 32 << 20;

/// What a mapping is aligned to, and the size of its pages if the system has such.
const HUGE_PAGE: usize = 2 << 20;

/// How often somebody who needs the pool's lock tries again, and lets others run in between. It is
/// held for less than a microsecond, so this is plenty, unless nobody is left to open it.
const TRIES: usize = 1000;

/// Uninitialised memory, aligned for segments; or with the bytes of a result that had it before.
pub struct Allocation {
    start: NonNull<u8>,
    nbytes: usize,
    /// What it lies in, a block of the allocator or a mapping of its own: the one or the other. Both
    /// can be larger than what was asked for.
    _block: Option<Block>,
    mapping: Option<Mapping>,
}

// SAFETY: plain memory without a home thread; nothing here reads or writes it through `&self`.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

impl Allocation {
    /// `None` if the system has no such memory.
    pub fn new(nbytes: usize) -> Option<Self> {
        let nbytes = nbytes.max(1);
        // The pool must not take what a result needs.
        Self::get(nbytes).or_else(|| (WARM.trim() > 0).then(|| Self::get(nbytes)).flatten())
    }

    fn get(nbytes: usize) -> Option<Self> {
        if nbytes < LARGE || allocator_keeps() {
            return Self::of_allocator(nbytes);
        }
        if let Some(mapping) = WARM.take(nbytes) {
            return Some(Self::of_mapping(nbytes, mapping));
        }
        // Mostly mapped afresh, too, and hardly touched: to take, ask and free it takes 30 us at
        // most, where the copy takes 10 ms.
        if let Some(block) = Self::of_allocator(nbytes).filter(Self::has_its_pages) {
            return Some(block);
        }
        match Mapping::new(nbytes) {
            Some(mapping) => Some(Self::of_mapping(nbytes, mapping)),
            // What a mapping needs beyond its size may be what is missing.
            None => Self::of_allocator(nbytes),
        }
    }

    fn of_allocator(nbytes: usize) -> Option<Self> {
        let block = Block::new(nbytes.checked_add(SEGMENT_ALIGN - 1)?)?;
        let start = block.start.as_ptr();
        let start = start.wrapping_add(start.addr().wrapping_neg() % SEGMENT_ALIGN);
        Some(Self { start: NonNull::new(start)?, nbytes, _block: Some(block), mapping: None })
    }

    fn of_mapping(nbytes: usize, mapping: Mapping) -> Self {
        Self { start: mapping.start, nbytes, _block: None, mapping: Some(mapping) }
    }

    /// Whether the memory is warm: nearly all pages of a sample are there.
    fn has_its_pages(&self) -> bool {
        const SAMPLE: usize = 16;
        let Some(page) = page_size() else { return false };
        let step = self.nbytes / SAMPLE;
        let mut missing =
            (0..SAMPLE).filter(|at| !is_there(self.start().wrapping_add(at * step), page));
        // The second one ends it.
        missing.nth(1).is_none()
    }

    /// Its first byte.
    pub fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// How many bytes were asked for, and at least 1.
    pub fn nbytes(&self) -> usize {
        self.nbytes
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if let Some(mapping) = self.mapping.take() {
            WARM.give(mapping);
        }
    }
}

/// What the allocator gave. Aligned by hand: an aligned block glibc cuts out of a larger one and frees
/// both ends, which stay in a thread's cache. Once freed, the block has no room for the next of its
/// size then, and each batch gets another place: 64 batches of 5 MB were in 20 places, and up to half
/// as fast as in one.
struct Block {
    start: NonNull<u8>,
    layout: Layout,
}

impl Block {
    fn new(nbytes: usize) -> Option<Self> {
        let layout = Layout::from_size_align(nbytes.max(1), align_of::<usize>()).ok()?;
        // SAFETY: the layout's size is at least 1.
        let start = NonNull::new(unsafe { alloc(layout) })?;
        Some(Self { start, layout })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout; freed only here.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// Whether the allocator keeps a large block that is freed, and its pages with it. Asked once.
#[cfg(target_os = "linux")]
fn allocator_keeps() -> bool {
    use std::sync::atomic::AtomicU8;

    // No lock, which a forked child could find taken; threads that ask at one time all look.
    static KNOWN: AtomicU8 = AtomicU8::new(0);
    const NO: u8 = 1;
    const YES: u8 = 2;
    match KNOWN.load(Ordering::Relaxed) {
        0 => {
            // Twice: another thread may have mapped what was just freed.
            let keeps = !allocator_is_libc() && keeps_block() && keeps_block();
            KNOWN.store(if keeps { YES } else { NO }, Ordering::Relaxed);
            keeps
        }
        known => known == YES,
    }
}

/// Whether memory comes from the C library, which maps each large block afresh: glibc as well as
/// musl. What is free in the heap of a process that has run for a while may hold one, too; so to
/// free a block and look, as for others, would say something else from time to time.
#[cfg(target_os = "linux")]
fn allocator_is_libc() -> bool {
    use std::ffi::CStr;

    // Not `malloc`: an executable that takes that one's address, as some Pythons do, is where it is
    // then found. Whoever replaces `malloc` and `free` must replace this one, too.
    let function: unsafe extern "C" fn(_, _, _) -> _ = libc::posix_memalign;
    let mut found = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: asks where an address is from, and fills the struct if that is known.
    let code = unsafe { libc::dladdr(function as *const libc::c_void, &raw mut found) };
    if code == 0 || found.dli_fname.is_null() {
        return false;
    }
    // SAFETY: the path of a file that stays loaded.
    let path = unsafe { CStr::from_ptr(found.dli_fname) };
    let name = path.to_bytes().rsplit(|&byte| byte == b'/').next().unwrap_or_default();
    [&b"libc."[..], b"libc-", b"ld-musl"].iter().any(|start| name.starts_with(start))
}

/// Whether a block that is freed keeps its pages; also if there is no such block.
#[cfg(target_os = "linux")]
fn keeps_block() -> bool {
    let (Some(block), Some(page)) = (Block::new(LARGE), page_size()) else { return true };
    let middle = block.start.as_ptr().wrapping_add(LARGE / 2);
    // SAFETY: inside the block.
    unsafe { middle.write_volatile(1) };
    drop(block);
    is_there(middle, page)
}

/// Whether the page of an address is in memory.
#[cfg(target_os = "linux")]
fn is_there(address: *const u8, page: usize) -> bool {
    let of_page = address.wrapping_sub(address.addr() % page).cast_mut();
    let mut is_there = 0_u8;
    // SAFETY: asks about one page, for which it writes one byte; it fails if nothing is there.
    let code = unsafe { libc::mincore(of_page.cast(), page, (&raw mut is_there).cast()) };
    code == 0 && is_there & 1 == 1
}

/// Elsewhere all memory is the allocator's.
#[cfg(not(target_os = "linux"))]
fn allocator_keeps() -> bool {
    true
}

/// Elsewhere nobody asks.
#[cfg(not(target_os = "linux"))]
fn is_there(_address: *const u8, _page: usize) -> bool {
    true
}

#[cfg(unix)]
fn page_size() -> Option<usize> {
    // SAFETY: no more than a question.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).ok()
}

/// Whole pages of their own, which go when this is dropped.
struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory without a home thread.
unsafe impl Send for Mapping {}

#[cfg(target_os = "linux")]
impl Mapping {
    /// Fresh pages, huge ones where the system has such: at least so many bytes, and less than a
    /// page more. `None` if there is no room.
    fn new(nbytes: usize) -> Option<Self> {
        let page = page_size()?;
        let len = nbytes.checked_next_multiple_of(page)?;
        let room = len.checked_add(HUGE_PAGE - page)?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, where the system finds room; it replaces none.
        let found = unsafe { libc::mmap(std::ptr::null_mut(), room, protection, flags, -1, 0) };
        if found == libc::MAP_FAILED {
            return None;
        }
        let found = found.cast::<u8>();
        let before = found.addr().wrapping_neg() % HUGE_PAGE;
        let start = found.wrapping_add(before);
        // If an end can't go, addresses stay taken, but no memory: nobody ever touches them.
        for (start, len) in [(found, before), (start.wrapping_add(len), room - before - len)] {
            if len > 0 {
                // SAFETY: whole pages of the new mapping, outside what is returned.
                unsafe { libc::munmap(start.cast(), len) };
            }
        }
        // The pages after the last whole huge one stay small: no memory beyond the end is used. A
        // system without huge pages refuses, which does no harm.
        let whole = len / HUGE_PAGE * HUGE_PAGE;
        // SAFETY: inside the mapping, to which nobody else has the address.
        unsafe { libc::madvise(start.cast(), whole, libc::MADV_HUGEPAGE) };
        Some(Self { start: NonNull::new(start)?, len })
    }
}

#[cfg(target_os = "linux")]
impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: whole pages that `new` mapped; whoever drops this has no address into them.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

#[cfg(not(target_os = "linux"))]
impl Mapping {
    /// See `allocator_keeps`.
    fn new(_nbytes: usize) -> Option<Self> {
        None
    }
}

/// The blocks that results of this process return to.
pub static WARM: WarmPool = WarmPool::new();

/// Mappings that wait to be used again; never more bytes than the cap.
///
/// The last view of a result can be dropped on any thread, with or without the interpreter lock.
/// So nobody here ever waits for the lock: who finds it taken maps or unmaps instead, as if there
/// were no pool. In a child forked while another thread held the lock, nobody will ever open it,
/// and there the pool is off. (A child that finds it open has copies of the blocks. Whoever writes
/// to one first, parent or child, pays once for the pages being copied: as much as for fresh small
/// ones.) Nothing is mapped or unmapped, and no Python runs, while it is held.
pub struct WarmPool {
    cap: AtomicUsize,
    /// Changed under the lock; read by those who only ask.
    nbytes: AtomicUsize,
    /// Those that came last are last.
    blocks: Mutex<Vec<Mapping>>,
}

impl WarmPool {
    /// Off, until a cap is set.
    const fn new() -> Self {
        let (cap, nbytes) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self { cap, nbytes, blocks: Mutex::new(Vec::new()) }
    }

    /// Bytes of the blocks that wait.
    pub fn nbytes(&self) -> usize {
        self.nbytes.load(Ordering::Relaxed)
    }

    /// The most bytes there may be from now on; 0 turns the pool off.
    pub fn set_cap(&self, cap: usize) {
        self.cap.store(cap, Ordering::Relaxed);
        self.shrink(cap);
    }

    /// Gives all memory back; says how many bytes.
    pub fn trim(&self) -> usize {
        self.shrink(0)
    }

    fn shrink(&self, to: usize) -> usize {
        let mut tries = 0..TRIES;
        while self.nbytes() > to && tries.next().is_some() {
            if let Some(mut blocks) = self.lock() {
                let old = self.make_room(&mut blocks, to);
                drop(blocks);
                return old.iter().map(|block| block.len).sum();
            }
            thread::yield_now();
        }
        0
    }

    /// The smallest block that holds so many bytes, if no more than a fifth of it is left over.
    fn take(&self, nbytes: usize) -> Option<Mapping> {
        if self.nbytes() == 0 {
            return None;
        }
        let mut blocks = self.lock()?;
        let fits = nbytes..=nbytes.saturating_add(nbytes / 4);
        let fitting = blocks.iter().enumerate().filter(|(_, block)| fits.contains(&block.len));
        let (at, _) = fitting.min_by_key(|(_, block)| block.len)?;
        let block = blocks.remove(at);
        self.nbytes.fetch_sub(block.len, Ordering::Relaxed);
        Some(block)
    }

    /// Keeps a block that nobody looks at any more, in place of those that came first; one that is
    /// larger than the cap goes.
    fn give(&self, block: Mapping) {
        // What goes is declared first, and so unmapped last, when the lock is open again.
        let _old;
        if let Some(mut blocks) = self.lock() {
            if let Some(rest) = self.cap.load(Ordering::Relaxed).checked_sub(block.len) {
                _old = self.make_room(&mut blocks, rest);
                self.nbytes.fetch_add(block.len, Ordering::Relaxed);
                blocks.push(block);
            }
        }
    }

    /// Takes the oldest blocks out until no more than so many bytes are left.
    fn make_room(&self, blocks: &mut Vec<Mapping>, left: usize) -> Vec<Mapping> {
        let mut nbytes = self.nbytes();
        let first = blocks.iter().take_while(|block| {
            let goes = nbytes > left;
            nbytes -= if goes { block.len } else { 0 };
            goes
        });
        let count = first.count();
        self.nbytes.store(nbytes, Ordering::Relaxed);
        blocks.drain(..count).collect()
    }

    /// The blocks, unless somebody has them.
    fn lock(&self) -> Option<MutexGuard<'_, Vec<Mapping>>> {
        match self.blocks.try_lock() {
            Ok(blocks) => Some(blocks),
            // Whatever panicked left whole blocks.
            Err(TryLockError::Poisoned(blocks)) => Some(blocks.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn block(mib: usize) -> Mapping {
        Mapping::new(mib * MIB).expect("memory")
    }

    fn warm(cap: usize) -> WarmPool {
        let pool = WarmPool::new();
        pool.set_cap(cap * MIB);
        pool
    }

    /// Lengths in MiB of what is in a pool, oldest first.
    fn inside(pool: &WarmPool) -> Vec<usize> {
        let lens: Vec<_> = pool.lock().unwrap().iter().map(|block| block.len).collect();
        assert_eq!(pool.nbytes(), lens.iter().sum::<usize>());
        lens.iter().map(|len| len / MIB).collect()
    }

    #[test]
    fn a_mapping_is_aligned_to_a_huge_page_and_ends_with_a_page_of_its_own() {
        let page = page_size().unwrap();
        for nbytes in [1, page, page + 1, 3 * HUGE_PAGE, 3 * HUGE_PAGE + 1, 5 * HUGE_PAGE - 1] {
            let mapping = Mapping::new(nbytes).unwrap();
            assert_eq!(mapping.start.addr().get() % HUGE_PAGE, 0);
            assert_eq!(mapping.len, nbytes.next_multiple_of(page));
            for at in [0, nbytes - 1, mapping.len - 1] {
                // SAFETY: inside the mapping.
                unsafe { mapping.start.as_ptr().wrapping_add(at).write(7) };
            }
        }
    }

    #[test]
    fn sizes_that_no_system_has_are_refused() {
        for nbytes in [usize::MAX, usize::MAX - 4096, isize::MAX as usize, 1 << 60] {
            assert!(Mapping::new(nbytes).is_none());
            assert!(Allocation::new(nbytes).is_none());
        }
    }

    #[test]
    fn only_large_allocations_have_a_mapping() {
        for (nbytes, own) in [(0, false), (LARGE - 1, false), (LARGE, true), (LARGE + 1, true)] {
            let allocation = Allocation::new(nbytes).unwrap();
            assert_eq!(allocation.mapping.is_some(), own && !allocator_keeps());
            assert_eq!(allocation.nbytes(), nbytes.max(1));
            assert_eq!(allocation.start().addr() % SEGMENT_ALIGN, 0);
        }
    }

    #[test]
    fn the_c_library_is_known_by_its_file() {
        assert!(allocator_is_libc());
        assert!(!allocator_keeps());
    }

    #[test]
    fn without_a_cap_nothing_is_kept() {
        let pool = WarmPool::new();
        pool.give(block(1));
        assert!(inside(&pool).is_empty());
        assert!(pool.take(MIB).is_none());
    }

    #[test]
    fn the_smallest_block_is_taken_that_fits_well() {
        let pool = warm(100);
        for mib in [6, 10, 5, 12] {
            pool.give(block(mib));
        }
        let take = |mib: usize| pool.take(mib * MIB).map(|block| block.len / MIB);
        assert_eq!(take(13), None);
        assert_eq!(take(7), None, "10 would leave more than a quarter of 7 over");
        assert_eq!(take(8), Some(10));
        assert_eq!(take(5), Some(5));
        assert_eq!(take(5), Some(6));
        assert_eq!(inside(&pool), [12]);
    }

    #[test]
    fn a_block_takes_the_place_of_the_oldest_ones_and_never_exceeds_the_cap() {
        let pool = warm(10);
        for (mib, left) in [
            (4, vec![4]),
            (6, vec![4, 6]),
            (3, vec![6, 3]),
            (11, vec![6, 3]),
            (10, vec![10]),
            (1, vec![1]),
        ] {
            pool.give(block(mib));
            assert_eq!(inside(&pool), left);
        }
    }

    #[test]
    fn a_lower_cap_and_a_trim_give_memory_back() {
        let pool = warm(10);
        for mib in [2, 3, 4] {
            pool.give(block(mib));
        }
        pool.set_cap(7 * MIB);
        assert_eq!(inside(&pool), [3, 4]);
        assert_eq!(pool.trim(), 7 * MIB);
        assert!(inside(&pool).is_empty());
        assert_eq!(pool.trim(), 0);
        pool.set_cap(0);
        pool.give(block(1));
        assert!(inside(&pool).is_empty());
    }

    #[test]
    fn nobody_waits_for_a_lock_that_stays_taken() {
        let pool = warm(10);
        pool.give(block(2));
        let taken = pool.lock().unwrap();
        assert!(pool.take(2 * MIB).is_none());
        pool.give(block(2));
        assert_eq!(pool.trim(), 0);
        pool.set_cap(0);
        drop(taken);
        assert_eq!(inside(&pool), [2]);
    }

    #[test]
    fn a_panic_with_the_lock_taken_leaves_the_pool_usable() {
        let pool = warm(10);
        pool.give(block(2));
        std::panic::catch_unwind(|| {
            let _taken = pool.lock();
            panic!("as it must be");
        })
        .unwrap_err();
        assert!(pool.blocks.is_poisoned());
        pool.give(block(3));
        assert_eq!(inside(&pool), [2, 3]);
        assert!(pool.take(2 * MIB).is_some());
    }

    #[test]
    fn threads_never_share_a_block_nor_exceed_the_cap() {
        let pool = warm(8);
        let reused = AtomicUsize::new(0);
        thread::scope(|scope| {
            for mark in 1..=8_u8 {
                let (pool, reused) = (&pool, &reused);
                scope.spawn(move || {
                    let mut random = u64::from(mark);
                    for _ in 0..2000 {
                        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        let nbytes = MIB + (random >> 40) as usize % (2 * MIB);
                        let taken = pool.take(nbytes);
                        reused.fetch_add(usize::from(taken.is_some()), Ordering::Relaxed);
                        let block = taken.unwrap_or_else(|| Mapping::new(nbytes).unwrap());
                        let ends = [0, nbytes - 1].map(|at| block.start.as_ptr().wrapping_add(at));
                        for end in ends {
                            // SAFETY: inside the block.
                            unsafe { end.write_volatile(mark) };
                        }
                        thread::yield_now();
                        for end in ends {
                            // SAFETY: as above.
                            assert_eq!(unsafe { end.read_volatile() }, mark);
                        }
                        pool.give(block);
                        assert!(pool.nbytes() <= 8 * MIB);
                    }
                });
            }
        });
        assert!(reused.into_inner() > 0);
        inside(&pool);
    }
}
