//! Times the core by itself, without Python: `make bench-core`.
//!
//! Where bytes move, each group has a `bare` arm beside it: `copy_nonoverlapping` of the same bytes
//! from the same leaves to the same memory, which nothing that copies them can beat by much.

use std::hint::black_box;
use std::ptr;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput};
use mmcollate_core::dtype::{DType, code};
use mmcollate_core::gather::{SegmentPtr, gather};
use mmcollate_core::plan::{Demand, Kind, Output, Way, lay_out, plan_field};
use mmcollate_core::shape;
use mmcollate_core::source::{Layouts, SourcePtr};

/// Sizes and strides of each leaf.
type Shapes = Vec<(Vec<i64>, Vec<i64>)>;

const FLAT: Kind = Kind::Flat { dim: 0 };

fn dense(sizes: &[i64]) -> (Vec<i64>, Vec<i64>) {
    (sizes.to_vec(), shape::contiguous_strides(sizes).unwrap().to_vec())
}

/// A matrix that is read across: its first dimension is the one without gaps.
fn transposed(rows: i64, columns: i64) -> (Vec<i64>, Vec<i64>) {
    (vec![rows, columns], vec![1, rows])
}

fn leaves(count: usize, shape: impl Fn(i64) -> (Vec<i64>, Vec<i64>)) -> Shapes {
    (0..count as i64).map(shape).collect()
}

fn layouts(dtype: DType, shapes: &Shapes) -> Layouts {
    let (sizes, strides) = &shapes[0];
    let mut layouts = Layouts::new(dtype, dtype.item_size().unwrap(), sizes, strides);
    for (sizes, strides) in &shapes[1..] {
        layouts.push(sizes, strides);
    }
    layouts
}

fn plan(criterion: &mut Criterion) {
    let int64 = DType::new(code::INT, 64);
    let bf16 = DType::new(code::BFLOAT, 16);
    let mut group = criterion.benchmark_group("plan");
    for count in [1, 8, 64, 512] {
        let cases = [
            ("batched uniform", Kind::Batched, int64, leaves(count, |_| dense(&[3]))),
            ("flat uniform", FLAT, bf16, leaves(count, |_| dense(&[64, 1176]))),
            ("flat ragged", FLAT, bf16, leaves(count, |i| dense(&[64 + i % 7, 1176]))),
            ("flat padded", FLAT, bf16, leaves(count, |i| dense(&[64, 1000 + i % 7]))),
            ("batched strided", Kind::Batched, bf16, leaves(count, |_| transposed(64, 32))),
        ];
        for (name, kind, dtype, shapes) in cases {
            // As the boundary to Python does it: layouts are noted leaf by leaf, then planned.
            group.bench_function(BenchmarkId::new(name, count), |bencher| {
                bencher.iter(|| plan_field(kind, &layouts(dtype, black_box(&shapes))));
            });
        }
    }
    group.finish();
}

fn place(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("lay_out");
    for count in [1, 8, 64, 512] {
        let demands: Vec<_> = (0..count)
            .map(|i| Demand { nbytes: 24 + 1000 * (i % 5), floating: i % 3 == 0, own: i % 16 == 1 })
            .collect();
        group.bench_function(BenchmarkId::from_parameter(count), |bencher| {
            bencher.iter(|| lay_out(black_box(&demands)));
        });
    }
    group.finish();
}

/// Leaves in memory of their own, and what is made of them.
struct Field {
    memory: Vec<Vec<u8>>,
    output: Output,
    /// Bytes that the leaves hold; the output's are more if it is padded.
    leaf_bytes: Vec<usize>,
}

impl Field {
    fn new(kind: Kind, dtype: DType, shapes: &Shapes) -> Self {
        let leaf_bytes: Vec<_> = shapes
            .iter()
            .map(|(sizes, _)| shape::byte_count(sizes, dtype.item_size().unwrap()).unwrap())
            .collect();
        // No leaf here has gaps, so each spans as many bytes as it holds.
        let memory = leaf_bytes.iter().map(|&len| vec![1; len]).collect();
        let Ok(Way::Gather(output)) = plan_field(kind, &layouts(dtype, shapes)) else {
            panic!("nothing to gather");
        };
        Self { memory, output, leaf_bytes }
    }
}

fn bench_field(criterion: &mut Criterion, name: &str, field: &Field) {
    // SAFETY: the leaves' memory is `field`'s, which is borrowed until this function's end.
    let source = |memory: &Vec<u8>| unsafe { SourcePtr::new(memory.as_ptr()) };
    let sources: Vec<_> = field.memory.iter().map(source).collect();
    let mut segment = vec![0_u8; field.output.nbytes];
    let mut group = criterion.benchmark_group(format!("gather/{name}"));
    group.throughput(Throughput::Bytes(field.leaf_bytes.iter().sum::<usize>() as u64));
    group.bench_function("gather", |bencher| {
        let target = SegmentPtr::new(segment.as_mut_ptr());
        bencher.iter(|| {
            // SAFETY: the output was planned from these leaves; the segment is as long as it.
            unsafe { gather(black_box(&field.output), black_box(&sources), target) };
        });
    });
    group.bench_function("bare", |bencher| {
        let target = segment.as_mut_ptr();
        bencher.iter(|| {
            let mut end = 0;
            for (source, &len) in black_box(&sources).iter().zip(&field.leaf_bytes) {
                let to = target.wrapping_add(end);
                // SAFETY: the leaf holds `len` bytes; all leaves together hold no more than the
                // segment.
                unsafe { ptr::copy_nonoverlapping(source.address(), to, len) };
                end += len;
            }
        });
    });
    group.finish();
}

fn rows(criterion: &mut Criterion) {
    let bytes = DType::new(code::UINT, 8);
    for (name, count, len) in
        [("24 B", 64, 24), ("1 KiB", 64, 1 << 10), ("64 KiB", 8, 64 << 10), ("1 MiB", 2, 1 << 20)]
    {
        let field = Field::new(Kind::Batched, bytes, &leaves(count, |_| dense(&[len])));
        bench_field(criterion, &format!("{count} rows of {name}"), &field);
    }
}

fn runs(criterion: &mut Criterion) {
    let bf16 = DType::new(code::BFLOAT, 16);
    let field = Field::new(FLAT, bf16, &leaves(512, |i| dense(&[512 + 3 * i])));
    bench_field(criterion, "512 runs of 1 to 4 KiB", &field);
}

fn strided(criterion: &mut Criterion) {
    let types = [(code::UINT, 8), (code::BFLOAT, 16), (code::FLOAT, 32), (code::INT, 64)];
    for (code, bits) in types {
        let shapes = leaves(4, |_| transposed(64, 64));
        let field = Field::new(Kind::Batched, DType::new(code, bits), &shapes);
        bench_field(criterion, &format!("4 transposed 64 x 64, {bits} bits"), &field);
    }
}

fn padded(criterion: &mut Criterion) {
    let bf16 = DType::new(code::BFLOAT, 16);
    let field = Field::new(FLAT, bf16, &leaves(8, |i| dense(&[32, 1000 + 8 * i])));
    bench_field(criterion, "8 leaves padded with zeros", &field);
}

/// Short: a minute for all of them. What is compared with figures of another day wants
/// `--measurement-time`.
fn quick() -> Criterion {
    Criterion::default()
        .sample_size(30)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(800))
        .nresamples(5000)
}

fn main() {
    let mut criterion = quick().configure_from_args();
    for benches in [plan, place, rows, runs, strided, padded] {
        benches(&mut criterion);
    }
    criterion.final_summary();
}
