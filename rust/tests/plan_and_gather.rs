//! Plan and gather against a model that moves one element at a time.

use mmcollate_core::dtype::{DType, code};
use mmcollate_core::gather::{SegmentPtr, gather, gather_range};
use mmcollate_core::plan::{Kind, Output, Way, plan_field};
use mmcollate_core::shape;
use mmcollate_core::source::{Layouts, SourcePtr};
use proptest::prelude::*;

/// A leaf with memory of its own: random bytes, of which it shows a strided part.
#[derive(Clone, Debug)]
struct Leaf {
    sizes: Vec<i64>,
    strides: Vec<i64>,
    /// Bytes before the first element, so that addresses are of any alignment.
    lead: usize,
    memory: Vec<u8>,
}

impl Leaf {
    /// Lays the dimensions out in `order` (innermost first), each with `gaps` elements after it.
    fn new(sizes: Vec<i64>, order: &[usize], gaps: &[i64], lead: usize, item_size: usize) -> Self {
        let mut strides = vec![0; sizes.len()];
        let mut next = 1;
        for &d in order {
            strides[d] = next;
            next *= sizes[d].max(1) + gaps[d];
        }
        let len = lead + usize::try_from(next).unwrap() * item_size;
        // A pattern in which neighbouring elements and neighbouring leaves differ.
        let seed = lead as u64 * 31 + next as u64;
        let memory =
            (0..len as u64).map(|i| ((i * 2_654_435_761 + seed * 97) >> 3) as u8).collect();
        Self { sizes, strides, lead, memory }
    }

    fn element(&self, index: &[i64], item_size: usize) -> &[u8] {
        let at: i64 = index.iter().zip(&self.strides).map(|(i, stride)| i * stride).sum();
        let start = self.lead + usize::try_from(at).unwrap() * item_size;
        &self.memory[start..start + item_size]
    }
}

fn indices(sizes: &[i64]) -> Vec<Vec<i64>> {
    let mut all = vec![vec![]];
    for &size in sizes {
        all = all
            .iter()
            .flat_map(|index| (0..size).map(move |i| [&index[..], &[i]].concat()))
            .collect();
    }
    all
}

/// The batch as the definition says it, element by element: sizes and bytes.
fn model(kind: Kind, leaves: &[Leaf], item_size: usize) -> (Vec<i64>, Vec<u8>) {
    let first = &leaves[0].sizes;
    let (sizes, dim) = match kind {
        Kind::Batched => ([&[leaves.len() as i64], &first[..]].concat(), None),
        Kind::Flat { dim } => {
            let dim =
                usize::try_from(if dim < 0 { dim + first.len() as i64 } else { dim }).unwrap();
            let of = |d: usize| leaves.iter().map(move |leaf| leaf.sizes[d]);
            let sizes = (0..first.len())
                .map(|d| if d == dim { of(d).sum() } else { of(d).max().unwrap() })
                .collect();
            (sizes, Some(dim))
        }
        Kind::Shared => unreachable!("never gathered"),
    };
    let strides = shape::contiguous_strides(&sizes).unwrap();
    let mut bytes = vec![0; shape::byte_count(&sizes, item_size).unwrap()];
    let mut joined = 0;
    for (row, leaf) in leaves.iter().enumerate() {
        for index in indices(&leaf.sizes) {
            let mut target = index.clone();
            match dim {
                None => target.insert(0, row as i64),
                Some(dim) => target[dim] += joined,
            }
            let at: i64 = target.iter().zip(&strides).map(|(i, stride)| i * stride).sum();
            let start = usize::try_from(at).unwrap() * item_size;
            bytes[start..start + item_size].copy_from_slice(leaf.element(&index, item_size));
        }
        joined += dim.map_or(0, |dim| leaf.sizes[dim]);
    }
    (sizes, bytes)
}

fn run(output: &Output, leaves: &[Leaf]) -> Vec<u8> {
    const GUARD: usize = 64;
    // Dirty memory, with a margin on both sides that must stay as it is.
    let mut segment = vec![0xAB; output.nbytes + 2 * GUARD];
    // SAFETY: the leaves' memory outlives the gather below.
    let source = |leaf: &Leaf| unsafe { SourcePtr::new(leaf.memory[leaf.lead..].as_ptr()) };
    let sources: Vec<_> = leaves.iter().map(source).collect();
    let target = SegmentPtr::new(segment[GUARD..].as_mut_ptr());
    // SAFETY: `output` was planned from these leaves; the segment is `output.nbytes` long and new.
    unsafe { gather(output, &sources, target) };
    assert!(segment[..GUARD].iter().all(|&byte| byte == 0xAB), "wrote before the segment");
    assert!(segment[GUARD + output.nbytes..].iter().all(|&byte| byte == 0xAB), "wrote behind it");
    segment[GUARD..GUARD + output.nbytes].to_vec()
}

/// The same in several ranges, each to memory of its own.
fn run_in_ranges(output: &Output, leaves: &[Leaf], cuts: &[usize]) -> Vec<u8> {
    const GUARD: usize = 64;
    let mut bounds: Vec<_> = cuts.iter().map(|cut| cut % (output.nbytes + 1)).collect();
    bounds.extend([0, output.nbytes]);
    bounds.sort_unstable();
    // SAFETY: the leaves' memory outlives the gathers below.
    let source = |leaf: &Leaf| unsafe { SourcePtr::new(leaf.memory[leaf.lead..].as_ptr()) };
    let sources: Vec<_> = leaves.iter().map(source).collect();
    let mut bytes = Vec::new();
    for range in bounds.windows(2) {
        let len = range[1] - range[0];
        let mut segment = vec![0xAB; len + 2 * GUARD];
        let target = SegmentPtr::new(segment[GUARD..].as_mut_ptr());
        let range = range[0]..range[1];
        let leaves = output.leaves_in(&range, sources.len());
        // SAFETY: `output` was planned from these leaves; the segment is as long as the range.
        unsafe { gather_range(output, &sources[leaves], target, range) };
        assert!(segment[..GUARD].iter().all(|&byte| byte == 0xAB), "wrote before the segment");
        assert!(segment[GUARD + len..].iter().all(|&byte| byte == 0xAB), "wrote behind it");
        bytes.extend_from_slice(&segment[GUARD..GUARD + len]);
    }
    bytes
}

fn dtype() -> impl Strategy<Value = DType> {
    prop_oneof![
        Just(DType::new(code::BOOL, 8)),
        Just(DType::new(code::BFLOAT, 16)),
        Just(DType::new(code::FLOAT, 32)),
        Just(DType::new(code::INT, 64)),
    ]
}

/// Leaves of one rank; `alike` ones have the same sizes, and dense ones no gaps.
fn batch() -> impl Strategy<Value = (DType, Vec<Leaf>)> {
    (dtype(), 0_usize..5, 2_usize..6, any::<bool>(), any::<bool>()).prop_flat_map(
        |(dtype, rank, count, alike, dense)| {
            let sizes = prop::collection::vec(prop_oneof![1 => Just(0_i64), 8 => 1_i64..5], rank);
            let order = Just((0..rank).rev().collect::<Vec<_>>());
            let order = if dense { order.boxed() } else { order.prop_shuffle().boxed() };
            let gaps = prop::collection::vec(if dense { 0_i64..1 } else { 0_i64..3 }, rank);
            let leaf = (sizes.clone(), order, gaps, 0_usize..9);
            (prop::collection::vec(leaf, count), sizes).prop_map(move |(leaves, common)| {
                let item_size = dtype.item_size().unwrap();
                let leaves = leaves.into_iter().map(|(sizes, order, gaps, lead)| {
                    let sizes = if alike { common.clone() } else { sizes };
                    Leaf::new(sizes, &order, &gaps, lead, item_size)
                });
                (dtype, leaves.collect())
            })
        },
    )
}

fn cuts() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(any::<usize>(), 0..6)
}

fn layouts(dtype: DType, leaves: &[Leaf]) -> Layouts {
    let item_size = dtype.item_size().unwrap();
    let mut layouts = Layouts::new(dtype, item_size, &leaves[0].sizes, &leaves[0].strides);
    for leaf in &leaves[1..] {
        layouts.push(&leaf.sizes, &leaf.strides);
    }
    layouts
}

fn check(kind: Kind, dtype: DType, leaves: &[Leaf], cuts: &[usize]) -> Result<(), TestCaseError> {
    let planned = plan_field(kind, &layouts(dtype, leaves)).expect("nothing here is refused");
    let Way::Gather(output) = planned else {
        prop_assert!(kind == Kind::Batched && planned == Way::List, "{planned:?}");
        prop_assert!(leaves.iter().any(|leaf| leaf.sizes != leaves[0].sizes));
        return Ok(());
    };
    let (sizes, bytes) = model(kind, leaves, dtype.item_size().unwrap());
    prop_assert_eq!(output.sizes.as_slice(), &sizes[..]);
    prop_assert_eq!(output.nbytes, bytes.len());
    prop_assert_eq!(&run(&output, leaves), &bytes);
    prop_assert_eq!(&run_in_ranges(&output, leaves, cuts), &bytes);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn a_batched_field_is_what_the_model_says((dtype, leaves) in batch(), cuts in cuts()) {
        check(Kind::Batched, dtype, &leaves, &cuts)?;
    }

    #[test]
    fn a_flat_field_is_what_the_model_says((dtype, leaves) in batch(), pick in any::<prop::sample::Index>(), negative in any::<bool>(), cuts in cuts()) {
        let rank = leaves[0].sizes.len();
        prop_assume!(rank > 0);
        let dim = pick.index(rank) as i64 - if negative { rank as i64 } else { 0 };
        check(Kind::Flat { dim }, dtype, &leaves, &cuts)?;
    }
}
