//! The arena's books: which slot may be written to, by whom, and how much memory there may be.
//!
//! A slot is a buffer of a fixed size in memory that a device can read by itself. The buffers are
//! somebody else's; here is only what state each is in.
//!
//! ```text
//!            grow                settled              launch
//!   Absent ────────> Growing ────────────┐   ┌─────────────────> InFlight
//!     ^                 │                v   │                      │
//!     │     (no memory) │              Leased                       │
//!     ├─────────────────┘             │  │  ^                       │ release: the fence
//!     │              retire           │  │  │ lease                 │ has passed
//!     └───────────────────────────────┘  v  │                       │
//!                                release Free <──────────────────────┘
//! ```
//!
//! - There are as many places for slots as the cap allows, so the cap holds by construction,
//!   whatever runs at the same time.
//! - A [`Lease`] carries the slot's generation, which every way back to `Free` or `Absent` counts
//!   up. A lease that was given back is refused from then on.
//! - No locks: each place is one atomic number, and every move is one compare-and-swap. A process
//!   that forks in the middle of a move leaves nothing locked.

#[cfg(all(test, loom))]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(all(test, loom)))]
use std::sync::atomic::{AtomicU64, Ordering};

use thiserror::Error;

/// Exclusive use of a slot, until it is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Which slot.
    pub slot: usize,
    /// How often it had been given back before.
    pub generation: u64,
}

/// What a slot's state forbids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ArenaError {
    /// The lease was given back before, or the slot is in no state for this.
    #[error("slot {slot}: a stale lease of generation {generation}, or not in the state for this")]
    Stale {
        /// The lease's slot.
        slot: usize,
        /// The lease's generation.
        generation: u64,
    },
}

/// What state slots are in, and how many in each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Their memory is being allocated.
    pub growing: usize,
    /// Ready to be leased.
    pub free: usize,
    /// Somebody writes to them.
    pub leased: usize,
    /// A device may still read them.
    pub in_flight: usize,
}

impl Census {
    /// Slots that have memory, or are about to.
    pub fn total(&self) -> usize {
        self.growing + self.free + self.leased + self.in_flight
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
enum State {
    Absent = 0,
    Growing = 1,
    Free = 2,
    Leased = 3,
    InFlight = 4,
}

/// One place for a slot: its state in the low bits, its generation above.
struct Place(AtomicU64);

const STATE_BITS: u32 = 3;

fn pack(generation: u64, state: State) -> u64 {
    generation << STATE_BITS | state as u64
}

fn unpack(word: u64) -> (u64, State) {
    let state = match word & ((1 << STATE_BITS) - 1) {
        0 => State::Absent,
        1 => State::Growing,
        2 => State::Free,
        3 => State::Leased,
        _ => State::InFlight,
    };
    (word >> STATE_BITS, state)
}

impl Place {
    fn read(&self) -> (u64, State) {
        // Acquire: see `change`.
        unpack(self.0.load(Ordering::Acquire))
    }

    /// Moves from one state to another, if it is in the first, of this generation.
    fn change(&self, generation: u64, from: State, to: State) -> bool {
        let next = match to {
            State::Free | State::Absent => generation.wrapping_add(1),
            _ => generation,
        };
        // Release on giving back, acquire on taking: who leases a slot sees all that its last
        // holder did with it.
        self.0
            .compare_exchange(
                pack(generation, from),
                pack(next, to),
                Ordering::AcqRel,
                Ordering::Relaxed,
            )
            .is_ok()
    }
}

/// The books of one arena.
pub struct Arena {
    places: Box<[Place]>,
    slot_bytes: usize,
}

impl Arena {
    /// An arena without slots yet, of at most `cap` bytes in slots of `slot_bytes` (at least 1).
    pub fn new(slot_bytes: usize, cap: usize) -> Self {
        let slot_bytes = slot_bytes.max(1);
        let places = (0..cap / slot_bytes).map(|_| Place(AtomicU64::new(0))).collect();
        Self { places, slot_bytes }
    }

    /// Bytes of each slot.
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Most slots that there can be.
    pub fn capacity(&self) -> usize {
        self.places.len()
    }

    /// Takes a free slot.
    pub fn lease(&self) -> Option<Lease> {
        self.take(State::Free, State::Leased)
    }

    /// Takes a place that has no memory yet, to give it some: [`Self::settled`] must follow.
    pub fn grow(&self) -> Option<Lease> {
        self.take(State::Absent, State::Growing)
    }

    /// The place that grew has memory now and is leased, or has none and is given back.
    pub fn settled(&self, lease: Lease, has_memory: bool) -> Result<(), ArenaError> {
        let to = if has_memory { State::Leased } else { State::Absent };
        self.step(lease, &[State::Growing], to)
    }

    /// A device is about to read the slot: it is not to be written to until its fence has passed.
    pub fn launch(&self, lease: Lease) -> Result<(), ArenaError> {
        self.step(lease, &[State::Leased], State::InFlight)
    }

    /// Gives a slot back. One in flight must have passed its fence: who calls this says so.
    pub fn release(&self, lease: Lease) -> Result<(), ArenaError> {
        self.step(lease, &[State::Leased, State::InFlight], State::Free)
    }

    /// Takes a leased slot out of use: its memory may go.
    pub fn retire(&self, lease: Lease) -> Result<(), ArenaError> {
        self.step(lease, &[State::Leased], State::Absent)
    }

    /// How many slots are in which state; while others move them, a snapshot of each by itself.
    pub fn census(&self) -> Census {
        let mut census = Census::default();
        for place in &self.places {
            match place.read().1 {
                State::Absent => {}
                State::Growing => census.growing += 1,
                State::Free => census.free += 1,
                State::Leased => census.leased += 1,
                State::InFlight => census.in_flight += 1,
            }
        }
        census
    }

    fn take(&self, from: State, to: State) -> Option<Lease> {
        self.places.iter().enumerate().find_map(|(slot, place)| {
            let (generation, state) = place.read();
            (state == from && place.change(generation, from, to))
                .then_some(Lease { slot, generation })
        })
    }

    fn step(&self, lease: Lease, from: &[State], to: State) -> Result<(), ArenaError> {
        let Lease { slot, generation } = lease;
        let moved = self
            .places
            .get(slot)
            .is_some_and(|place| from.iter().any(|&from| place.change(generation, from, to)));
        if moved { Ok(()) } else { Err(ArenaError::Stale { slot, generation }) }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn grown(arena: &Arena) -> Lease {
        let lease = arena.grow().unwrap();
        arena.settled(lease, true).unwrap();
        lease
    }

    #[test]
    fn the_cap_is_never_exceeded() {
        let arena = Arena::new(4, 11);
        assert_eq!(arena.capacity(), 2);
        grown(&arena);
        let second = arena.grow().unwrap();
        assert_eq!(arena.grow(), None);
        arena.settled(second, false).unwrap();
        assert_eq!(arena.census(), Census { leased: 1, ..Census::default() });
        assert!(arena.grow().is_some());
    }

    #[test]
    fn a_cap_below_one_slot_is_no_arena() {
        assert_eq!(Arena::new(8, 7).grow(), None);
        assert_eq!(Arena::new(8, 0).lease(), None);
    }

    #[test]
    fn a_slot_in_flight_is_not_leased() {
        let arena = Arena::new(4, 4);
        let lease = grown(&arena);
        arena.launch(lease).unwrap();
        assert_eq!((arena.lease(), arena.grow()), (None, None));
        assert!(arena.retire(lease).is_err());
        arena.release(lease).unwrap();
        assert_eq!(arena.lease().unwrap().slot, lease.slot);
    }

    #[test]
    fn a_lease_given_back_is_refused() {
        let arena = Arena::new(4, 4);
        let old = grown(&arena);
        arena.release(old).unwrap();
        let stale = ArenaError::Stale { slot: 0, generation: 0 };
        assert_eq!(arena.release(old), Err(stale));
        let new = arena.lease().unwrap();
        assert_ne!(new, old);
        assert_eq!(arena.launch(old), Err(stale));
        assert_eq!(arena.release(old), Err(stale));
        assert_eq!(arena.settled(old, true), Err(stale));
        arena.launch(new).unwrap();
        assert!(arena.launch(new).is_err());
        arena.release(new).unwrap();
    }

    #[test]
    fn a_slot_out_of_use_makes_room_for_another() {
        let arena = Arena::new(4, 8);
        let leases = [(); 2].map(|()| grown(&arena));
        arena.retire(leases[0]).unwrap();
        assert!(arena.retire(leases[0]).is_err());
        assert_eq!(arena.census().total(), 1);
        let again = arena.grow().unwrap();
        assert_eq!(again.slot, leases[0].slot);
        assert!(arena.release(leases[0]).is_err());
    }

    #[test]
    fn a_lease_of_no_slot_is_refused() {
        let nowhere = Lease { slot: 7, generation: 0 };
        assert!(Arena::new(4, 4).release(nowhere).is_err());
    }
}

/// Every order in which threads can move slots: `RUSTFLAGS="--cfg loom" cargo test --lib arena`.
#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    /// An arena of one slot that has memory and is free, and what is written to the slot.
    fn one_slot() -> (Arena, UnsafeCell<u32>) {
        let arena = Arena::new(1, 1);
        let lease = arena.grow().unwrap();
        arena.settled(lease, true).unwrap();
        arena.release(lease).unwrap();
        (arena, UnsafeCell::new(0))
    }

    #[test]
    fn a_slot_has_one_writer_at_a_time() {
        loom::model(|| {
            let shared = Arc::new(one_slot());
            let write = |by: u32| {
                let shared = shared.clone();
                move || {
                    let (arena, bytes) = &*shared;
                    if let Some(lease) = arena.lease() {
                        // Loom reports two accesses that nothing orders.
                        bytes.with_mut(|bytes| unsafe { *bytes = by });
                        arena.launch(lease).unwrap();
                        bytes.with(|bytes| assert_eq!(unsafe { *bytes }, by));
                        arena.release(lease).unwrap();
                        assert!(arena.release(lease).is_err());
                    }
                }
            };
            let other = thread::spawn(write(1));
            write(2)();
            other.join().unwrap();
        });
    }

    #[test]
    fn the_cap_holds_while_threads_grow() {
        loom::model(|| {
            let arena = Arc::new(Arena::new(1, 1));
            let grow = |has_memory: bool| {
                let arena = arena.clone();
                move || {
                    let Some(lease) = arena.grow() else { return false };
                    assert!(arena.census().total() <= 1);
                    arena.settled(lease, has_memory).unwrap();
                    has_memory
                }
            };
            let other = thread::spawn(grow(true));
            let here = grow(false)();
            assert!(!here);
            let grown = other.join().unwrap();
            assert_eq!(arena.census().leased, usize::from(grown));
        });
    }

    #[test]
    fn a_slot_goes_out_of_use_or_is_leased_and_never_both() {
        loom::model(|| {
            let shared = Arc::new(one_slot());
            let retiring = {
                let shared = shared.clone();
                thread::spawn(move || {
                    shared.0.lease().is_some_and(|lease| shared.0.retire(lease).is_ok())
                })
            };
            let leased = shared.0.lease();
            let retired = retiring.join().unwrap();
            assert!(retired || leased.is_some());
            assert!(!(retired && leased.is_some()));
            if let Some(lease) = leased {
                shared.0.release(lease).unwrap();
            }
        });
    }
}
