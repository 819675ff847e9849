"""The Metal kernels, as bodies for `mx.fast.metal_kernel`, which writes the signatures.

A threadgroup has some query vectors of one sequence, all of heads that share a KV head, and one split of
its keys. Its simdgroups take blocks in turns; the lanes of a simdgroup share out a key's elements, so that
a block table entry, a key and a value are read once for all of the vectors. Where keys are split, a second
kernel merges what the splits found.

Both are plain enough for a C++ compiler, which tests them (tests/metal_shim): no infinities, no pointers
into what may be `device` or `constant` memory, and barriers and simdgroup sums only where all lanes pass.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Source:
    """`inputs` and `outputs` are names of arrays in `body`, which MLX finds `NAME_shape` in, too."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str


# Loops over arrays that live in registers are unrolled by order: an unknown index would put them in memory.
#
# Template: T of queries and pools, OUT; D and DV elements of a key and of a value; KV_HEADS, each with GROUP
# query heads; BLOCK tokens a block; VECTORS at most in a threadgroup, SIMDS simdgroups; WINDOW, 0 for none;
# CAPPED, SINKS; WHOLE if keys are not split.
# Grid: tile · KV_HEADS + KV head, sequence, split.
#
# queries  [rows, KV_HEADS · GROUP, D]
# keys     [slots, KV_HEADS, D], values [slots, KV_HEADS, DV]
# tables   four a sequence: first row, rows, context, where its block table begins; then block tables
# numbers  scale, softcap
# sinks    [heads], read if SINKS
# out      [rows, heads, splits, DV]; stats [rows, heads, splits, 2]: largest score, sum of weights
ATTEND = Source(
    "ferrum_paged_attend",
    ("queries", "keys", "values", "tables", "numbers", "sinks"),
    ("out", "stats"),
    """
constexpr int EK = (D + 31) / 32, EV = (DV + 31) / 32;  // elements in a lane
constexpr int KEYS = D > 128 ? 2 : 4;                   // read at once
constexpr int HEADS = KV_HEADS * GROUP;
constexpr float LOWEST = -1e30f;
threadgroup float peaks[SIMDS], totals[SIMDS], parts[SIMDS * DV];

const int lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup;
const int kv_head = threadgroup_position_in_grid.x % KV_HEADS;
const int tile = threadgroup_position_in_grid.x / KV_HEADS;
const int entry = 4 * threadgroup_position_in_grid.y;
const int split = threadgroup_position_in_grid.z, splits = threadgroups_per_grid.z;

const int start = tables[entry], rows = tables[entry + 1];
const int context = tables[entry + 2], table = tables[entry + 3];
const int position = context - rows;  // of the first row
const int vectors = min(int(VECTORS), rows * GROUP - tile * VECTORS);
if (vectors <= 0) return;

float q[VECTORS][EK], acc[VECTORS][EV], peak[VECTORS], total[VECTORS];
#pragma clang loop unroll(full)
for (int m = 0; m < VECTORS; m++) {
  const int v = tile * VECTORS + min(m, vectors - 1);
  const int64_t at = (int64_t(start + v / GROUP) * HEADS + kv_head * GROUP + v % GROUP) * D;
  for (int i = 0; i < EK; i++) {
    const int d = lane * EK + i;
    q[m][i] = D % 32 == 0 || d < D ? numbers[0] * static_cast<float>(queries[at + d]) : 0.0f;
  }
  for (int i = 0; i < EV; i++) acc[m][i] = 0.0f;
  peak[m] = LOWEST;
  total[m] = 0.0f;
}

const int lowest = WINDOW > 0 ? max(position - WINDOW + 1, 0) : 0;
const int first_block = lowest / BLOCK, end_block = (context - 1) / BLOCK + 1;
const int share = (end_block - first_block + splits - 1) / splits;
const int last = min(first_block + (split + 1) * share, end_block);
for (int b = first_block + split * share + sg; b < last; b += SIMDS) {
  const int64_t slot = (int64_t(tables[table + b]) - b) * BLOCK;  // of position 0, if all were like this
  const int end = min((b + 1) * BLOCK, context);
  for (int t = max(b * BLOCK, lowest); t < end; t += KEYS) {
    float k[KEYS][EK], w[KEYS][EV];
#pragma clang loop unroll(full)
    for (int j = 0; j < KEYS; j++) {
      const int64_t at = (slot + min(t + j, end - 1)) * KV_HEADS + kv_head;
      for (int i = 0; i < EK; i++) {
        const int d = lane * EK + i;
        k[j][i] = D % 32 == 0 || d < D ? static_cast<float>(keys[at * D + d]) : 0.0f;
      }
      for (int i = 0; i < EV; i++) {
        const int d = lane * EV + i;
        w[j][i] = DV % 32 == 0 || d < DV ? static_cast<float>(values[at * DV + d]) : 0.0f;
      }
    }
#pragma clang loop unroll(full)
    for (int m = 0; m < VECTORS; m++) {
      if (m >= vectors) continue;
      const int own = position + (tile * VECTORS + m) / GROUP;
      float score[KEYS], largest = peak[m];
      bool seen[KEYS];
#pragma clang loop unroll(full)
      for (int j = 0; j < KEYS; j++) {
        float s = 0.0f;
        for (int i = 0; i < EK; i++) s += q[m][i] * k[j][i];
        s = simd_sum(s);
        if (CAPPED) s = numbers[1] * precise::tanh(s / numbers[1]);
        seen[j] = t + j < end && t + j <= own && (WINDOW == 0 || t + j > own - WINDOW);
        score[j] = s;
        if (seen[j]) largest = max(largest, s);
      }
      const float shrink = fast::exp(peak[m] - largest);
      peak[m] = largest;
      total[m] *= shrink;
      for (int i = 0; i < EV; i++) acc[m][i] *= shrink;
#pragma clang loop unroll(full)
      for (int j = 0; j < KEYS; j++) {
        const float weight = seen[j] ? fast::exp(score[j] - largest) : 0.0f;
        total[m] += weight;
        for (int i = 0; i < EV; i++) acc[m][i] += weight * w[j][i];
      }
    }
  }
}

#pragma clang loop unroll(full)
for (int m = 0; m < VECTORS; m++) {
  if (m >= vectors) continue;
  if (lane == 0) {
    peaks[sg] = peak[m];
    totals[sg] = total[m];
  }
  for (int i = 0; i < EV; i++) {
    const int d = lane * EV + i;
    if (DV % 32 == 0 || d < DV) parts[sg * DV + d] = acc[m][i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int v = tile * VECTORS + m, head = kv_head * GROUP + v % GROUP;
  float largest = LOWEST, sum = 0.0f, factor[SIMDS];
  for (int g = 0; g < SIMDS; g++) largest = max(largest, peaks[g]);
  const float sink = SINKS && WHOLE ? static_cast<float>(sinks[head]) : LOWEST;
  largest = max(largest, sink);
  for (int g = 0; g < SIMDS; g++) {
    factor[g] = fast::exp(peaks[g] - largest);
    sum += factor[g] * totals[g];
  }
  if (SINKS && WHOLE) sum += fast::exp(sink - largest);
  const int64_t at = (int64_t(start + v / GROUP) * HEADS + head) * splits + split;
  for (int d = 32 * sg + lane; d < DV; d += 32 * SIMDS) {
    float found = 0.0f;
    for (int g = 0; g < SIMDS; g++) found += factor[g] * parts[g * DV + d];
    out[at * DV + d] = static_cast<OUT>(WHOLE ? found / sum : found);
  }
  if (!WHOLE && sg == 0 && lane == 0) {
    stats[2 * at] = largest;
    stats[2 * at + 1] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // before the next vector is written there
}
""",
)

# Template: T; DV; SINKS. Grid: one simdgroup, head, row.
# parts and stats are what ATTEND wrote; out [rows, heads, DV].
MERGE = Source(
    "ferrum_paged_merge",
    ("parts", "stats", "sinks"),
    ("out",),
    """
const int lane = thread_index_in_simdgroup;
const int head = threadgroup_position_in_grid.y;
const int heads = parts_shape[1], splits = parts_shape[2];
const int64_t row = int64_t(threadgroup_position_in_grid.z) * heads + head, first = row * splits;
float largest = -1e30f, sum = 0.0f;
for (int s = lane; s < splits; s += 32) largest = max(largest, stats[2 * (first + s)]);
largest = simd_max(largest);
const float sink = SINKS ? static_cast<float>(sinks[head]) : largest;
largest = max(largest, sink);
for (int s = lane; s < splits; s += 32)
  sum += stats[2 * (first + s) + 1] * fast::exp(stats[2 * (first + s)] - largest);
sum = simd_sum(sum);
if (SINKS) sum += fast::exp(sink - largest);
for (int d = lane; d < DV; d += 32) {
  float found = 0.0f;
  for (int s = 0; s < splits; s++)
    found += parts[(first + s) * DV + d] * fast::exp(stats[2 * (first + s)] - largest);
  out[row * DV + d] = static_cast<T>(found / sum);
}
""",
)
