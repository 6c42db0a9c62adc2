//! Parked threads that take part in large copies; none unless [`set_threads`] asks for them.
//!
//! The caller always works itself, and helpers take what it has not come to. So a helper that is
//! slow to wake costs nothing: the caller waits only for pieces that a helper has begun. Helpers
//! sleep between copies, and never spin.
//!
//! A process that is forked has none of its parent's threads: it starts its own when it needs them
//! (see [`Pool::of_this_process`]), and touches no lock of its parent's.

use std::process;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Bytes of a piece: large enough that claiming one is nothing, and the size of a huge page, so
/// that two threads do not make the same one.
pub const PIECE: usize = 2 << 20;

/// Copies of fewer bytes are the caller's alone: those of 1 and 5 MB, which lie in its caches, took
/// 1.7 and 1.2 times as long with a second thread that had to be woken.
pub const SHARE_FROM: usize = 8 << 20;

/// Threads that may work on one copy, the caller included.
static THREADS: AtomicUsize = AtomicUsize::new(1);

/// How many threads may work on one copy from now on, the caller included; 0 and 1 mean the caller
/// alone. More than the process may use at one time (its affinity and its share of the CPUs) are
/// not used.
pub fn set_threads(threads: usize) {
    THREADS.store(threads.max(1), Ordering::Relaxed);
}

/// Whether a copy of so many bytes is shared.
pub fn shares(nbytes: usize) -> bool {
    nbytes >= SHARE_FROM && THREADS.load(Ordering::Relaxed) > 1
}

/// Calls `work` once for each of `0..pieces`, on this thread and on helpers that are free, and
/// returns when all are done: how many of them helpers did.
///
/// A panic in `work` ends the process: others may still be working for the same caller.
pub fn run(pieces: usize, work: &(dyn Fn(usize) + Sync)) -> usize {
    let threads = THREADS.load(Ordering::Relaxed);
    if threads <= 1 || pieces <= 1 {
        (0..pieces).for_each(work);
        return 0;
    }
    Pool::of_this_process().run(threads - 1, pieces, work)
}

/// The helpers of one process.
struct Pool {
    pid: u32,
    /// Helpers that could work at one time beside a caller.
    most: usize,
    offer: Arc<Offer>,
}

/// Where helpers look for work.
#[derive(Default)]
struct Offer {
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Default)]
struct State {
    job: Option<Arc<Job>>,
    helpers: usize,
}

impl Offer {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing under this lock can panic halfway through a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a helper does until the process ends.
    fn help(&self) {
        let mut state = self.lock();
        loop {
            match state.job.clone().filter(|job| job.take_seat()) {
                Some(job) => {
                    drop(state);
                    job.work_off();
                    drop(job);
                    state = self.lock();
                }
                None => state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

impl Pool {
    /// The pool of this process, made when it is first asked for. One that a fork has left behind
    /// is never touched: its lock may be held for ever.
    fn of_this_process() -> &'static Self {
        static CURRENT: AtomicPtr<Pool> = AtomicPtr::new(ptr::null_mut());
        let found = CURRENT.load(Ordering::Acquire);
        // SAFETY: only leaked boxes are stored there.
        if let Some(pool) = unsafe { found.as_ref() }
            && pool.pid == process::id()
        {
            return pool;
        }
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        let made = Box::into_raw(Box::new(Self::new(cpus - 1)));
        match CURRENT.compare_exchange(found, made, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: leaked above.
            Ok(_) => unsafe { &*made },
            Err(other) => {
                // SAFETY: made above, and nobody else has seen it.
                drop(unsafe { Box::from_raw(made) });
                // SAFETY: only leaked boxes are stored there, and never null ones.
                unsafe { &*other }
            }
        }
    }

    fn new(most: usize) -> Self {
        Self { pid: process::id(), most, offer: Arc::default() }
    }

    fn run(&self, helpers: usize, pieces: usize, work: &(dyn Fn(usize) + Sync)) -> usize {
        let seats = helpers.min(self.most).min(pieces - 1);
        // SAFETY: `Job::wait` below returns when every piece is done, and nobody looks at `work`
        // for any other reason than a piece that is not.
        let job = Arc::new(unsafe { Job::new(seats, pieces, work) });
        let offered = seats > 0 && self.publish(&job, seats);
        let own = job.work_off();
        if offered {
            self.offer.lock().job = None;
        }
        job.wait();
        pieces - own
    }

    /// Shows a job to the helpers; `false` if they have another.
    fn publish(&self, job: &Arc<Job>, helpers: usize) -> bool {
        let mut state = self.offer.lock();
        if state.job.is_some() {
            return false;
        }
        while state.helpers < helpers && start_helper(Arc::clone(&self.offer)) {
            state.helpers += 1;
        }
        state.job = Some(Arc::clone(job));
        drop(state);
        self.offer.wake.notify_all();
        true
    }
}

/// Starts a helper; `false` if the system has no thread to give.
fn start_helper(offer: Arc<Offer>) -> bool {
    let _blocked = Signals::block();
    let builder = thread::Builder::new().name("mmcollate".into()).stack_size(256 << 10);
    builder.spawn(move || offer.help()).is_ok()
}

/// While it lives, this thread and those it starts are sent no signal: handlers are the host
/// process's, and expect its own threads.
struct Signals(libc::sigset_t);

impl Signals {
    fn block() -> Option<Self> {
        // SAFETY: a set of plain integers, for which zeros are a value.
        let mut all: libc::sigset_t = unsafe { std::mem::zeroed() };
        let mut before = all;
        // SAFETY: a set to be filled.
        unsafe { libc::sigfillset(&raw mut all) };
        // SAFETY: two sets, of which the second is filled.
        let code =
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before) };
        (code == 0).then_some(Self(before))
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        // SAFETY: the set that was in force before; no old one is asked for.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, ptr::null_mut()) };
    }
}

/// The pieces of one copy.
struct Job {
    /// Helpers that may still join.
    seats: AtomicUsize,
    /// The next piece that nobody has claimed.
    next: AtomicUsize,
    pieces: usize,
    done: Mutex<usize>,
    all_done: Condvar,
    work: Work,
}

/// The caller's function, whose lifetime is [`Job::new`]'s contract.
struct Work(*const (dyn Fn(usize) + Sync));

// SAFETY: what it points to is `Sync`, so that it may be called from any thread; when it may be is
// `Job::new`'s contract.
unsafe impl Send for Work {}
// SAFETY: as above.
unsafe impl Sync for Work {}

/// Ends the process if it is dropped by a panic.
struct NoPanic;

impl Drop for NoPanic {
    fn drop(&mut self) {
        if thread::panicking() {
            process::abort();
        }
    }
}

impl Job {
    /// # Safety
    ///
    /// `work` lives until [`Job::wait`] has returned.
    unsafe fn new<'a>(seats: usize, pieces: usize, work: &'a (dyn Fn(usize) + Sync + 'a)) -> Self {
        // SAFETY: only the lifetime changes, which the contract above takes the place of.
        let work: *const (dyn Fn(usize) + Sync + 'static) = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + 'a), _>(ptr::from_ref(work))
        };
        Self {
            seats: AtomicUsize::new(seats),
            next: AtomicUsize::new(0),
            pieces,
            done: Mutex::new(0),
            all_done: Condvar::new(),
            work: Work(work),
        }
    }

    /// Whether one more helper may join, which it then has.
    fn take_seat(&self) -> bool {
        let left = |seats: usize| seats.checked_sub(1);
        self.seats.fetch_update(Ordering::Relaxed, Ordering::Relaxed, left).is_ok()
    }

    /// Does pieces until all are claimed; returns how many.
    fn work_off(&self) -> usize {
        let _no_panic = NoPanic;
        let mut own = 0;
        loop {
            // Each piece is claimed once. What was written before is seen by way of the locks.
            let piece = self.next.fetch_add(1, Ordering::Relaxed);
            if piece >= self.pieces {
                break;
            }
            // SAFETY: a piece that is not done, so that the caller is still there.
            unsafe { (*self.work.0)(piece) };
            own += 1;
        }
        if own > 0 {
            let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
            *done += own;
            self.all_done.notify_all();
        }
        own
    }

    /// Waits until every piece is done. A helper that has claimed none is not waited for.
    fn wait(&self) {
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        while *done < self.pieces {
            done = self.all_done.wait(done).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::time::Duration;

    use super::*;

    fn counts(pieces: usize) -> Vec<AtomicUsize> {
        (0..pieces).map(|_| AtomicUsize::new(0)).collect()
    }

    #[test]
    fn each_piece_is_done_once() {
        let pool = Pool::new(3);
        for pieces in [1, 2, 3, 7, 100] {
            let seen = counts(pieces);
            pool.run(3, pieces, &|piece| {
                seen[piece].fetch_add(1, Ordering::Relaxed);
            });
            assert!(seen.iter().all(|count| count.load(Ordering::Relaxed) == 1), "{pieces}");
        }
    }

    #[test]
    fn helpers_take_part() {
        let pool = Pool::new(2);
        // Two pieces that wait for each other: one thread alone would never end.
        let both = Barrier::new(2);
        let theirs = pool.run(2, 2, &|_| {
            both.wait();
        });
        assert_eq!(theirs, 1);
    }

    #[test]
    fn as_many_helpers_join_as_may() {
        let pool = Pool::new(4);
        pool.run(4, 5, &|_| thread::sleep(Duration::from_millis(5)));
        assert_eq!(pool.offer.lock().helpers, 4);
        let (now, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        for _ in 0..20 {
            pool.run(1, 8, &|_| {
                most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                thread::sleep(Duration::from_micros(200));
                now.fetch_sub(1, Ordering::SeqCst);
            });
        }
        assert_eq!(most.into_inner(), 2);
        assert_eq!(pool.offer.lock().helpers, 4);
    }

    #[test]
    fn callers_that_come_at_one_time_all_get_their_own_done() {
        let pool = Pool::new(2);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        let seen = counts(9);
                        pool.run(2, 9, &|piece| {
                            seen[piece].fetch_add(1, Ordering::Relaxed);
                        });
                        assert!(seen.iter().all(|count| count.load(Ordering::Relaxed) == 1));
                    }
                });
            }
        });
    }

    #[test]
    fn a_helper_that_claimed_nothing_is_not_waited_for() {
        let work = |_: usize| {};
        // SAFETY: waited for below.
        let job = unsafe { Job::new(1, 3, &work) };
        // It has a seat, and sleeps.
        assert!(job.take_seat());
        assert_eq!(job.work_off(), 3);
        job.wait();
        assert!(!job.take_seat());
        // It wakes, and finds nothing.
        assert_eq!(job.work_off(), 0);
    }

    #[test]
    fn small_copies_are_not_shared() {
        set_threads(8);
        assert!(shares(SHARE_FROM) && !shares(SHARE_FROM - 1));
        set_threads(0);
        assert!(!shares(usize::MAX));
        let seen = counts(3);
        let theirs = run(3, &|piece| {
            seen[piece].fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(theirs, 0);
        assert!(seen.iter().all(|count| count.load(Ordering::Relaxed) == 1));
    }
}
