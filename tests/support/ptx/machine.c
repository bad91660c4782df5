/* The machine that program.py loads compiled kernels into: the instructions of PTX, each a function over the 32 lanes of a warp; the
   memory of a kernel and what is checked of each access; and the order in which warps run. Built once by program.py, for the
   processor at hand.

   An instruction is known if there is a function of its name here: ptx_ and its name without what changes no result (rounding to
   nearest where there is no other, cache hints, vector widths), see program.py. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { LANES = 32, OPERANDS = 12, ALL = 0, BRANCH, END, BARRIER };
enum { REPORTS = 64 };

/* What an access can be reported for; program.py has the words. */
enum { OUT_OF_BOUNDS, MISALIGNED, DIVERGED, SHARED_CONFLICT, DEVICE_CONFLICT, PROGRAM_CONFLICT, UNINITIALISED, UNDER_WAY, KINDS };

typedef struct { int32_t kind, instruction, program, warp, lane, bytes; uint64_t address; } Report;

/* Who touched some bytes last. Programs are counted from 1; epochs are barriers, counted over all programs. */
typedef struct { int32_t writer, written, reader, read; uint32_t readers; int16_t warp, pending; } Cell;

/* Memory of a tensor, or of several that share it: `allowed` has a byte for each `grain` bytes, as does `cells`. */
typedef struct { uint64_t begin, end, grain; const uint8_t *allowed; Cell *cells; } Region;

typedef struct { uint64_t from; uint32_t to; int32_t bytes, given, group, lane, instruction; uint8_t seen[16]; } Copy;

typedef struct {
  uint8_t *file;                 /* registers and constants, lane by lane, at the offsets that instructions name */
  int32_t pc[LANES], group[LANES];
  uint32_t running, waiting;     /* lanes; the others have ended */
  int index, copies, room;
  Copy *copy;
} Warp;

struct Machine;
typedef struct Instruction {
  void (*run)(struct Machine *, Warp *, const struct Instruction *, uint32_t);
  int64_t offset;                /* of an address */
  int32_t control, guard, unless, target, elements;
  int32_t at[OPERANDS];          /* where operands lie in the file */
} Instruction;

typedef struct Machine {
  const Instruction *code;
  Region *regions;
  int32_t n_regions;
  uint8_t *shared;
  Cell *shared_cells;
  uint64_t shared_bytes;
  int32_t program, epoch;
  int64_t instructions, barriers, loaded, stored, copied, found[KINDS];
  int32_t reports;
  Report report[REPORTS];
} Machine;

static void report(Machine *m, int kind, const Instruction *in, int warp, int lane, uint64_t address, int bytes) {
  m->found[kind]++;
  for (int i = 0; i < m->reports; i++) /* each instruction once */
    if (m->report[i].kind == kind && m->report[i].instruction == in - m->code) return;
  if (m->reports < REPORTS)
    m->report[m->reports++] = (Report){kind, (int32_t)(in - m->code), m->program - 1, warp, lane, bytes, address};
}

/* ---- memory */

static void conflicts(Machine *m, Cell *cell, int warp, int writes, int *same, int *other) {
  uint32_t mine = 1u << warp;
  if (cell->writer) {
    if (cell->writer != m->program) *other = 1;
    else if (cell->written == m->epoch && cell->warp != warp) *same = 1;
  }
  if (writes) {
    if (cell->reader && cell->reader != m->program) *other = 1; /* another program has read it, or several have */
    else if (cell->reader && cell->read == m->epoch && (cell->readers & ~mine)) *same = 1;
    cell->writer = m->program, cell->written = m->epoch, cell->warp = (int16_t)warp;
  } else {
    if (cell->reader && cell->reader != m->program) cell->reader = -1;
    else {
      if (!cell->reader || cell->read != m->epoch) cell->readers = 0;
      cell->reader = m->program, cell->read = m->epoch, cell->readers |= mine;
    }
  }
}

static uint8_t nowhere[64]; /* for accesses that are reported and not made */

static uint8_t *device(Machine *m, const Instruction *in, int warp, int lane, uint64_t address, int bytes, int writes) {
  if (address % bytes) { report(m, MISALIGNED, in, warp, lane, address, bytes); return nowhere; }
  *(writes ? &m->stored : &m->loaded) += bytes;
  for (Region *r = m->regions; r < m->regions + m->n_regions; r++) {
    if (address < r->begin || address + bytes > r->end) continue;
    int same = 0, other = 0;
    uint64_t first = (address - r->begin) / r->grain, last = (address + bytes - 1 - r->begin) / r->grain;
    for (uint64_t i = first; i <= last; i++) if (!r->allowed[i]) goto outside;
    for (uint64_t i = first; i <= last; i++) conflicts(m, r->cells + i, warp, writes, &same, &other);
    if (same) report(m, DEVICE_CONFLICT, in, warp, lane, address, bytes);
    if (other) report(m, PROGRAM_CONFLICT, in, warp, lane, address, bytes);
    return (uint8_t *)address;
  }
outside:
  report(m, OUT_OF_BOUNDS, in, warp, lane, address, bytes);
  memset(nowhere, 0xa5, sizeof nowhere);
  return nowhere;
}

/* `copying`: 1 where an asynchronous copy begins, -1 where it has arrived. */
static uint8_t *within(Machine *m, const Instruction *in, int warp, int lane, uint32_t address, int bytes, int writes, int copying) {
  if (address % bytes) { report(m, MISALIGNED, in, warp, lane, address, bytes); return nowhere; }
  if ((uint64_t)address + bytes > m->shared_bytes) {
    report(m, OUT_OF_BOUNDS, in, warp, lane, address, bytes);
    memset(nowhere, 0xa5, sizeof nowhere);
    return nowhere;
  }
  int same = 0, other = 0, pending = 0, nothing = 0;
  for (int i = 0; i < bytes; i++) {
    Cell *cell = m->shared_cells + address + i;
    if (cell->writer != m->program) { /* of a program before */
      nothing |= !writes;
      *cell = (Cell){0};
    }
    if (cell->reader != m->program) cell->reader = 0;
    if (copying < 0) cell->pending--;
    pending |= cell->pending > 0;
    conflicts(m, cell, warp, writes, &same, &other);
    if (copying > 0) cell->pending++;
  }
  if (same) report(m, SHARED_CONFLICT, in, warp, lane, address, bytes);
  if (pending) report(m, UNDER_WAY, in, warp, lane, address, bytes);
  if (nothing) report(m, UNINITIALISED, in, warp, lane, address, bytes);
  return m->shared + address;
}

/* ---- instructions */

#define PARAMETERS Machine *m, Warp *w, const Instruction *in, uint32_t lanes
#define OPERAND(type, i) ((type *)(w->file + in->at[i]))
#define UNUSED (void)m, (void)w, (void)in, (void)lanes
#define EACH(...)                                                                                     \
  if (lanes == ~0u) { _Pragma("GCC ivdep") for (int l = 0; l < LANES; l++) { __VA_ARGS__; } }          \
  else for (int l = 0; l < LANES; l++) if (lanes >> l & 1) { __VA_ARGS__; }

typedef uint8_t pred;
typedef uint16_t b16; typedef uint32_t b32; typedef uint64_t b64;
typedef uint16_t u16; typedef uint32_t u32; typedef uint64_t u64;
typedef int16_t s16; typedef int32_t s32; typedef int64_t s64;
typedef float f32; typedef double f64;

/* Of one, two, three operands x, y, z of these types. program.py reads how many there are. */
#define TAKES(name, n) const int32_t operands_##name = n;
#define ONE(name, to, a, value) \
  TAKES(name, 2) \
  void ptx_##name(PARAMETERS) { to *d = OPERAND(to, 0); const a *p = OPERAND(a, 1); UNUSED; EACH(a x = p[l]; d[l] = (to)(value)) }
#define TWO(name, to, a, b, value)                                                                              \
  TAKES(name, 3)                                                                                                \
  void ptx_##name(PARAMETERS) {                                                                                 \
    to *d = OPERAND(to, 0); const a *p = OPERAND(a, 1); const b *q = OPERAND(b, 2); UNUSED;                      \
    EACH(a x = p[l]; b y = q[l]; d[l] = (to)(value))                                                            \
  }
#define THREE(name, to, a, b, c, value)                                                                         \
  TAKES(name, 4)                                                                                                \
  void ptx_##name(PARAMETERS) {                                                                                 \
    to *d = OPERAND(to, 0); const a *p = OPERAND(a, 1); const b *q = OPERAND(b, 2); const c *r = OPERAND(c, 3); UNUSED; \
    EACH(a x = p[l]; b y = q[l]; c z = r[l]; d[l] = (to)(value))                                                \
  }

static inline f32 f(b32 x) { f32 y; memcpy(&y, &x, 4); return y; }
static inline b32 bits(f32 x) { b32 y; memcpy(&y, &x, 4); return y; }
/* .ftz: numbers that are too small for an exponent of their own are 0. */
static inline f32 flush(f32 x) { return bits(x) & 0x7f800000u ? x : f(bits(x) & 0x80000000u); }
static inline f32 of_bf16(b16 x) { return f((b32)x << 16); }
static inline f32 of_f16(b16 x) { _Float16 y; memcpy(&y, &x, 2); return (f32)y; }
static inline b16 to_bf16(f32 x) { b32 y = bits(x); return x != x ? 0x7fff : (b16)((y + 0x7fff + (y >> 16 & 1)) >> 16); }
static inline b16 to_f16(f32 x) { _Float16 y = (_Float16)x; b16 z; memcpy(&z, &y, 2); return x != x ? 0x7fff : z; }
/* Of a NaN and a number the number, and -0 before 0; .NaN: NaN if one is. */
static inline f32 larger(f32 x, f32 y) { return x != x ? y : y != y ? x : x == y ? f(bits(x) & bits(y)) : x > y ? x : y; }
static inline f32 smaller(f32 x, f32 y) { return x != x ? y : y != y ? x : x == y ? f(bits(x) | bits(y)) : x < y ? x : y; }
static inline f32 nan_if(int either, f32 x) { return either ? f(0x7fffffff) : x; }
static inline s32 to_s32(f32 x) { return x != x ? 0 : x >= 2147483648.0f ? INT32_MAX : x < -2147483648.0f ? INT32_MIN : (s32)x; }

/* fp32. What the hardware approximates is exact here, to half a unit in the last place. */
#define OF_FLOATS(round)                                                                   \
  TWO(add##round##_f32, f32, f32, f32, x + y)                                              \
  TWO(sub##round##_f32, f32, f32, f32, x - y)                                              \
  TWO(mul##round##_f32, f32, f32, f32, x * y)
OF_FLOATS() OF_FLOATS(_rn)
/* A number of 16 bits and one of fp32. */
TWO(add_rn_f32_bf16, f32, b16, f32, of_bf16(x) + y) TWO(add_rn_f32_f16, f32, b16, f32, of_f16(x) + y)
THREE(fma_rn_f32_bf16, f32, b16, b16, f32, fmaf(of_bf16(x), of_bf16(y), z))
THREE(fma_rn_f32_f16, f32, b16, b16, f32, fmaf(of_f16(x), of_f16(y), z))
THREE(fma_rn_f32, f32, f32, f32, f32, fmaf(x, y, z))
THREE(fma_rn_ftz_f32, f32, f32, f32, f32, flush(fmaf(flush(x), flush(y), flush(z))))
TWO(div_full_f32, f32, f32, f32, x / y)
TWO(div_approx_f32, f32, f32, f32, x / y)
TWO(div_rn_f32, f32, f32, f32, x / y)
ONE(ex2_approx_f32, f32, f32, exp2((double)x))
ONE(ex2_approx_ftz_f32, f32, f32, flush((f32)exp2((double)flush(x))))
ONE(neg_f32, f32, b32, f(x ^ 0x80000000u))
ONE(abs_f32, f32, b32, f(x & 0x7fffffffu))
TWO(max_f32, f32, f32, f32, larger(x, y))
TWO(min_f32, f32, f32, f32, smaller(x, y))
THREE(max3_f32, f32, f32, f32, f32, larger(larger(x, y), z)) THREE(min3_f32, f32, f32, f32, f32, smaller(smaller(x, y), z))
TWO(max_NaN_f32, f32, f32, f32, nan_if(x != x || y != y, larger(x, y)))
TWO(min_NaN_f32, f32, f32, f32, nan_if(x != x || y != y, smaller(x, y)))

/* fp64 */
TWO(add_f64, f64, f64, f64, x + y) TWO(add_rn_f64, f64, f64, f64, x + y)
TWO(sub_f64, f64, f64, f64, x - y) TWO(sub_rn_f64, f64, f64, f64, x - y)
TWO(mul_f64, f64, f64, f64, x * y) TWO(mul_rn_f64, f64, f64, f64, x * y)
THREE(fma_rn_f64, f64, f64, f64, f64, fma(x, y, z))
ONE(neg_f64, f64, f64, -x)
ONE(cvt_f64_f32, f64, f32, x) ONE(cvt_rn_f32_f64, f32, f64, x)

/* Two of them in 64 bits. */
#define PAIR(low, high) (bits(low) | (u64)bits(high) << 32)
#define LOW(x) f((b32)(x))
#define HIGH(x) f((b32)((x) >> 32))
#define OF_PAIRS(round)                                                                             \
  TWO(add##round##_f32x2, b64, b64, b64, PAIR(LOW(x) + LOW(y), HIGH(x) + HIGH(y)))                   \
  TWO(sub##round##_f32x2, b64, b64, b64, PAIR(LOW(x) - LOW(y), HIGH(x) - HIGH(y)))                   \
  TWO(mul##round##_f32x2, b64, b64, b64, PAIR(LOW(x) * LOW(y), HIGH(x) * HIGH(y)))
OF_PAIRS() OF_PAIRS(_rn)
THREE(fma_rn_f32x2, b64, b64, b64, b64, PAIR(fmaf(LOW(x), LOW(y), LOW(z)), fmaf(HIGH(x), HIGH(y), HIGH(z))))

/* Comparisons: ..u is true of a NaN, the others but ne are not. */
#define COMPARE(name, type, expression) TWO(setp_##name##_##type, pred, type, type, expression)
COMPARE(eq, f32, x == y) COMPARE(lt, f32, x < y) COMPARE(le, f32, x <= y) COMPARE(gt, f32, x > y) COMPARE(ge, f32, x >= y)
COMPARE(ne, f32, x < y || x > y) COMPARE(num, f32, x == x && y == y) COMPARE(nan, f32, x != x || y != y)
COMPARE(equ, f32, !(x < y || x > y)) COMPARE(neu, f32, x != y) COMPARE(ltu, f32, !(x >= y)) COMPARE(leu, f32, !(x > y))
COMPARE(gtu, f32, !(x <= y)) COMPARE(geu, f32, !(x < y))
COMPARE(eq, f64, x == y) COMPARE(neu, f64, x != y)
#define COMPARE_ALL(t) COMPARE(eq, t, x == y) COMPARE(ne, t, x != y) \
  COMPARE(lt, t, x < y) COMPARE(le, t, x <= y) COMPARE(gt, t, x > y) COMPARE(ge, t, x >= y)
COMPARE_ALL(s32) COMPARE_ALL(u32) COMPARE_ALL(s64) COMPARE_ALL(u64)
#define COMPARE_BITS(t) COMPARE(eq, t, x == y) COMPARE(ne, t, x != y)
COMPARE_BITS(b16) COMPARE_BITS(b32) COMPARE_BITS(b64)
TWO(setp_nan_bf16, pred, b16, b16, isnan(of_bf16(x)) || isnan(of_bf16(y)))
TWO(setp_nan_f16, pred, b16, b16, isnan(of_f16(x)) || isnan(of_f16(y)))
#define NAN_OF_TWO(type)                                                                                \
  TAKES(setp_nan_##type##x2, 4)                                                                         \
  void ptx_setp_nan_##type##x2(PARAMETERS) {                                                            \
    const b32 *p = OPERAND(b32, 2), *q = OPERAND(b32, 3); UNUSED;                                        \
    EACH(OPERAND(pred, 0)[l] = isnan(of_##type((b16)p[l])) || isnan(of_##type((b16)q[l]));               \
         OPERAND(pred, 1)[l] = isnan(of_##type((b16)(p[l] >> 16))) || isnan(of_##type((b16)(q[l] >> 16)))) \
  }
NAN_OF_TWO(bf16) NAN_OF_TWO(f16)

/* Moves and conversions */
#define MOVE(name, type) ONE(mov_##name, type, type, x)
MOVE(pred, pred) MOVE(b16, b16) MOVE(u16, b16) MOVE(b32, b32) MOVE(u32, b32) MOVE(f32, b32) MOVE(b64, b64) MOVE(u64, b64) MOVE(f64, b64)
#define SELECT(name, type) THREE(selp_##name, type, type, type, pred, z ? x : y)
SELECT(b16, b16) SELECT(b32, b32) SELECT(f32, b32) SELECT(b64, b64) SELECT(f64, b64)
TWO(mov_b32_of2, b32, b16, b16, x | (b32)y << 16)
TWO(mov_b64_of2, b64, b32, b32, x | (b64)y << 32)
#define UNPACK(type, half, width)                                                            \
  void ptx_mov_##type##_to2(PARAMETERS) {                                                    \
    const type *p = OPERAND(type, 2); UNUSED;                                                \
    EACH(type x = p[l]; OPERAND(half, 0)[l] = (half)x; OPERAND(half, 1)[l] = (half)(x >> width)) \
  }
UNPACK(b32, b16, 16) UNPACK(b64, b32, 32)
ONE(cvt_u16_u32, u16, u32, x) ONE(cvt_u32_u16, u32, u16, x)
ONE(cvt_u64_u32, u64, u32, x) ONE(cvt_u32_u64, u32, u64, x) ONE(cvt_s64_s32, s64, s32, x) ONE(cvt_s32_s64, s32, s64, x)
ONE(cvt_rn_f32_s32, f32, s32, x) ONE(cvt_rn_f32_u32, f32, u32, x) ONE(cvt_rzi_s32_f32, s32, f32, to_s32(x))
ONE(cvt_rpi_f32_f32, f32, f32, ceilf(x)) ONE(cvt_rpi_ftz_f32_f32, f32, f32, ceilf(flush(x)))
ONE(cvt_f32_bf16, f32, b16, of_bf16(x)) ONE(cvt_f32_f16, f32, b16, of_f16(x))
ONE(cvt_rn_bf16_f32, b16, f32, to_bf16(x)) ONE(cvt_rn_f16_f32, b16, f32, to_f16(x))
TWO(cvt_rn_bf16x2_f32, b32, f32, f32, to_bf16(y) | (b32)to_bf16(x) << 16)
TWO(cvt_rn_f16x2_f32, b32, f32, f32, to_f16(y) | (b32)to_f16(x) << 16)

/* Whole numbers; they wrap. A shift by as many bits or more leaves nothing, or the sign. */
#define OF_BITS(t, width)                                                                                     \
  TWO(and_b##width, t, t, t, x & y) TWO(or_b##width, t, t, t, x | y) TWO(xor_b##width, t, t, t, x ^ y)         \
  ONE(not_b##width, t, t, ~x)                                                                                 \
  TWO(shl_b##width, t, t, u32, y >= width ? 0 : (t)(x << y))                                                   \
  TWO(shr_u##width, t, t, u32, y >= width ? 0 : x >> y)                                                        \
  TWO(shr_s##width, s##width, s##width, u32, x >> (y >= width ? width - 1 : y))
OF_BITS(b16, 16) OF_BITS(b32, 32) OF_BITS(b64, 64)
TWO(and_pred, pred, pred, pred, x & y) TWO(or_pred, pred, pred, pred, x | y) TWO(xor_pred, pred, pred, pred, x ^ y)
ONE(not_pred, pred, pred, !x)
#define OF_INTEGERS(s, width)                                                                                  \
  TWO(add_##s##width, u##width, u##width, u##width, x + y) TWO(sub_##s##width, u##width, u##width, u##width, x - y) \
  TWO(mul_lo_##s##width, u##width, u##width, u##width, (u64)x * y)                                              \
  THREE(mad_lo_##s##width, u##width, u##width, u##width, u##width, (u64)x * y + z)                              \
  TWO(div_##s##width, s##width, s##width, s##width, y ? x / y : (s##width)-1) TWO(rem_##s##width, s##width, s##width, s##width, y ? x % y : x) \
  TWO(min_##s##width, s##width, s##width, s##width, x < y ? x : y) TWO(max_##s##width, s##width, s##width, s##width, x > y ? x : y)
OF_INTEGERS(s, 32) OF_INTEGERS(u, 32) OF_INTEGERS(s, 64) OF_INTEGERS(u, 64)
ONE(popc_b32, u32, u32, __builtin_popcount(x))
ONE(neg_s32, u32, u32, -x) ONE(neg_s64, u64, u64, -x)
TWO(mul_wide_s32, s64, s32, s32, (s64)x * y) TWO(mul_wide_u32, u64, u32, u32, (u64)x * y)
THREE(mad_wide_s32, u64, s32, s32, u64, (u64)((s64)x * y) + z) THREE(mad_wide_u32, u64, u32, u32, u64, (u64)x * y + z)
THREE(bfe_u32, u32, u32, u32, u32, (y & 255) > 31 ? 0 : x >> (y & 255) & (z & 255 ? ~0u >> (32 - ((z & 255) > 32 ? 32 : z & 255)) : 0))

static inline s32 field(s32 x, u32 at, u32 width) { /* the highest bit of the field fills the rest */
  at &= 255, width &= 255;
  u32 last = at + width > 31 ? 31 : at + width - 1;
  if (!width) return 0;
  u32 sign = (u32)x >> last & 1, mask = width > 31 ? ~0u : (1u << width) - 1;
  u32 found = at > 31 ? 0 : (u32)x >> at & mask;
  u32 have = at > 31 ? 0 : last - at + 1;
  return (s32)(sign && have < 32 ? found | ~0u << have : found);
}
THREE(bfe_s32, s32, s32, u32, u32, field(x, y, z))

/* Between lanes. All that the mask names have to take part. */
static void check_mask(PARAMETERS, int operand) {
  const u32 *mask = OPERAND(u32, operand);
  for (int l = 0; l < LANES; l++)
    if (lanes >> l & 1 && mask[l] != lanes) { report(m, DIVERGED, in, w->index, l, 0, 0); return; }
}
#define SHUFFLE(mode, source, inside)                                                        \
  TAKES(shfl_sync_##mode##_b32, 5)                                                           \
  void ptx_shfl_sync_##mode##_b32(PARAMETERS) {                                              \
    b32 from[LANES]; memcpy(from, OPERAND(b32, 1), sizeof from);                             \
    check_mask(m, w, in, lanes, 4);                                                          \
    EACH(int by = OPERAND(s32, 2)[l] & 31; int c = OPERAND(s32, 3)[l]; int part = c >> 8 & 31; int clamp = c & 31; \
         int last = (l & part) | (clamp & ~part); int first = l & part; (void)first; (void)last;                    \
         int j = source; if (!(inside)) j = l;                                               \
         if (!(lanes >> j & 1)) report(m, DIVERGED, in, w->index, l, 0, 0);                   \
         OPERAND(b32, 0)[l] = from[j])                                                       \
  }
SHUFFLE(bfly, l ^ by, j <= last) SHUFFLE(up, l - by, j >= last) SHUFFLE(down, l + by, j <= last)
SHUFFLE(idx, first | (by & ~part), j <= last)
#define REDUCE(name, type, step)                                                             \
  TAKES(redux_sync_##name##_##type, 3)                                                       \
  void ptx_redux_sync_##name##_##type(PARAMETERS) {                                          \
    const type *p = OPERAND(type, 1); type x = 0; int begun = 0;                             \
    check_mask(m, w, in, lanes, 2);                                                          \
    for (int l = 0; l < LANES; l++) if (lanes >> l & 1) { type y = p[l]; x = begun++ ? (step) : y; } \
    EACH(OPERAND(type, 0)[l] = x)                                                            \
  }
REDUCE(add, s32, (s32)((u32)x + (u32)y))
REDUCE(max, s32, x > y ? x : y) REDUCE(min, s32, x < y ? x : y)
REDUCE(max, f32, larger(x, y)) REDUCE(min, f32, smaller(x, y))
void ptx_bar_warp_sync(PARAMETERS) { check_mask(m, w, in, lanes, 0); }

/* Memory. Operands: the elements, and behind them the address. Zeros fill a register that is wider. */
#define ADDRESS(type) (OPERAND(type, in->elements)[l] + in->offset)
#define ACCESS(name, space, pointer, memory, type, go)                                                                  \
  void ptx_ld_##space##_##name(PARAMETERS) {                                                                            \
    for (int l = 0; l < LANES; l++) if (lanes >> l & 1) {                                                               \
      const uint8_t *p = go(m, in, w->index, l, (pointer)ADDRESS(pointer), (int)sizeof(memory) * in->elements, 0 MORE); \
      for (int i = 0; i < in->elements; i++) { memory x; memcpy(&x, p + i * sizeof x, sizeof x); OPERAND(type, i)[l] = x; } \
    }                                                                                                                   \
  }                                                                                                                     \
  void ptx_st_##space##_##name(PARAMETERS) {                                                                            \
    for (int l = 0; l < LANES; l++) if (lanes >> l & 1) {                                                               \
      uint8_t *p = go(m, in, w->index, l, (pointer)ADDRESS(pointer), (int)sizeof(memory) * in->elements, 1 MORE);       \
      for (int i = 0; i < in->elements; i++) { memory x = (memory)OPERAND(type, i)[l]; memcpy(p + i * sizeof x, &x, sizeof x); } \
    }                                                                                                                   \
  }
#define MORE
ACCESS(b8_in_b16, global, u64, uint8_t, b16, device) ACCESS(b8_in_b32, global, u64, uint8_t, b32, device)
ACCESS(b16, global, u64, b16, b16, device) ACCESS(b16_in_b32, global, u64, b16, b32, device)
ACCESS(b32, global, u64, b32, b32, device) ACCESS(b64, global, u64, b64, b64, device)
#undef MORE
#define MORE , 0
ACCESS(b8_in_b16, shared, u32, uint8_t, b16, within) ACCESS(b8_in_b32, shared, u32, uint8_t, b32, within)
ACCESS(b16, shared, u32, b16, b16, within) ACCESS(b16_in_b32, shared, u32, b16, b32, within)
ACCESS(b32, shared, u32, b32, b32, within) ACCESS(b64, shared, u32, b64, b64, within)

/* 8 x 8 matrices of 16 bits: eight lanes name the rows of each, and every lane gets or gives two neighbours of a row. */
#define MATRICES(name, writes, row, column, move)                                                                       \
  void ptx_##name(PARAMETERS) {                                                                                         \
    if (lanes != ~0u) { report(m, DIVERGED, in, w->index, 0, 0, 0); return; }                                           \
    uint8_t *rows[LANES] = {0};                                                                                         \
    for (int l = 0; l < 8 * in->elements; l++) rows[l] = within(m, in, w->index, l, (u32)ADDRESS(u32), 16, writes, 0);   \
    for (int l = 0; l < LANES; l++) for (int i = 0; i < in->elements; i++) for (int h = 0; h < 2; h++) {                 \
      uint8_t *p = rows[8 * i + (row)] + 2 * (column);                                                                  \
      uint8_t *x = (uint8_t *)(OPERAND(b32, i) + l) + 2 * h;                                                            \
      move;                                                                                                             \
    }                                                                                                                   \
  }
MATRICES(ldmatrix_sync_aligned_m8n8_shared_b16, 0, l >> 2, 2 * (l & 3) + h, memcpy(x, p, 2))
MATRICES(ldmatrix_sync_aligned_m8n8_trans_shared_b16, 0, 2 * (l & 3) + h, l >> 2, memcpy(x, p, 2))
MATRICES(stmatrix_sync_aligned_m8n8_shared_b16, 1, l >> 2, 2 * (l & 3) + h, memcpy(p, x, 2))
MATRICES(stmatrix_sync_aligned_m8n8_trans_shared_b16, 1, 2 * (l & 3) + h, l >> 2, memcpy(p, x, 2))

/* Asynchronous copies to shared memory arrive as late as they may: when their group is waited for. Operands: address in shared memory,
   in device memory, bytes that are read (the rest are zeros); `target` has the bytes that are written, `elements` the offset of the
   first address. */
void ptx_cp_async_shared_global(PARAMETERS) {
  for (int l = 0; l < LANES; l++) if (lanes >> l & 1) {
    Copy c = {OPERAND(u64, 1)[l] + in->offset, (u32)(OPERAND(u32, 0)[l] + in->elements), in->target, OPERAND(s32, 2)[l], w->group[l], l,
              (int32_t)(in - m->code), {0}};
    if (c.given < 0 || c.given > c.bytes) { report(m, OUT_OF_BOUNDS, in, w->index, l, c.from, c.given); continue; }
    if (c.from % c.bytes) { report(m, MISALIGNED, in, w->index, l, c.from, c.bytes); continue; }
    within(m, in, w->index, l, c.to, c.bytes, 1, 1);
    if (c.given) memcpy(c.seen, device(m, in, w->index, l, c.from, c.given, 0), c.given);
    if (w->copies == w->room) w->copy = realloc(w->copy, sizeof(Copy) * (w->room = 2 * w->room + 64));
    w->copy[w->copies++] = c;
  }
}
void ptx_cp_async_commit_group(PARAMETERS) { UNUSED; EACH(w->group[l]++) }
/* `target`: the groups that may be under way still, or -1: none, nor copies without a group. */
void ptx_cp_async_wait_group(PARAMETERS) {
  int left = 0;
  for (int i = 0; i < w->copies; i++) {
    Copy c = w->copy[i];
    if (!(lanes >> c.lane & 1) || (in->target >= 0 && c.group >= w->group[c.lane] - in->target)) { w->copy[left++] = c; continue; }
    const Instruction *begun = m->code + c.instruction;
    uint8_t *to = within(m, begun, w->index, c.lane, c.to, c.bytes, 1, -1);
    if (c.given) {
      const uint8_t *from = device(m, begun, w->index, c.lane, c.from, c.given, 0);
      if (memcmp(from, c.seen, c.given)) report(m, UNDER_WAY, begun, w->index, c.lane, c.from, c.given);
      memcpy(to, from, c.given);
      m->copied += c.given;
      m->loaded -= c.given; /* counted when it began */
    }
    memset(to + c.given, 0, c.bytes - c.given);
  }
  w->copies = left;
}

/* ---- warps */

/* Runs a warp until all of its lanes wait or have ended. Lanes that part meet again where the code does: those that are furthest behind
   go first. */
static void run_warp(Machine *m, Warp *w) {
  while (w->running) {
    int at = INT32_MAX, meet = INT32_MAX;
    uint32_t lanes = 0;
    for (int l = 0; l < LANES; l++) {
      if (!(w->running >> l & 1)) continue;
      int pc = w->pc[l];
      if (pc < at) meet = at, at = pc, lanes = 0;
      else if (pc > at && pc < meet) meet = pc;
      if (pc == at) lanes |= 1u << l;
    }
    const Instruction *in = m->code + at;
    uint32_t go = lanes;
    for (;; in++, go = lanes) {
      m->instructions++;
      if (in->guard >= 0) {
        const pred *guard = (const pred *)(w->file + in->guard);
        for (int l = 0; l < LANES; l++) if (!guard[l] == !in->unless) go &= ~(1u << l);
      }
      if (in->control) break;
      if (go) in->run(m, w, in, go);
      if (in + 1 - m->code == meet) break;
    }
    int next = (int)(in - m->code) + 1;
    for (int l = 0; l < LANES; l++) if (lanes >> l & 1) w->pc[l] = in->control == BRANCH && go >> l & 1 ? in->target : next;
    if (in->control == END) w->running &= ~go;
    if (in->control == BARRIER) w->running &= ~go, w->waiting |= go;
  }
}

/* Whether the program goes on: all of its threads wait at one barrier, or have ended. */
static int pass_barrier(Machine *m, Warp *warps, int n) {
  int at = -1, ended = 0, apart = 0, who = 0, lane = 0;
  for (int i = 0; i < n; i++) for (int l = 0; l < LANES; l++) {
    if (!(warps[i].waiting >> l & 1)) { ended = 1; continue; }
    if (at >= 0 && at != warps[i].pc[l]) apart = 1;
    at = warps[i].pc[l], who = i, lane = l;
  }
  if (at < 0) return 0;
  if (apart || ended) report(m, DIVERGED, m->code + at - 1, who, lane, 0, 0);
  for (int i = 0; i < n; i++) warps[i].running = warps[i].waiting, warps[i].waiting = 0;
  m->epoch++, m->barriers++;
  return 1;
}

/* 0: as they are, 1: reversed, others: shuffled by that seed. */
static void arrange(int *order, int n, uint32_t how, uint32_t *state) {
  for (int i = 0; i < n; i++) order[i] = how == 1 ? n - 1 - i : i;
  for (int i = n - 1; how > 1 && i > 0; i--) {
    *state = *state * 1664525u + 1013904223u;
    int j = (int)((*state >> 8) % (uint32_t)(i + 1)), was = order[i];
    order[i] = order[j], order[j] = was;
  }
}

typedef struct { int32_t file_bytes, constants, thread, program; } Layout; /* of a file: where constants begin, where ids of both lie */

void ptx_launch(Machine *m, const Layout *layout, const uint8_t *constants, int programs, int threads, uint32_t order) {
  int n = threads / LANES;
  uint32_t state = order * 2654435761u + 1;
  Warp *warps = calloc(n, sizeof *warps);
  int *turn = malloc(sizeof(int) * n), *which = malloc(sizeof(int) * programs);
  m->shared = aligned_alloc(1024, (m->shared_bytes + 1023) / 1024 * 1024 + 1024);
  m->shared_cells = calloc(m->shared_bytes + 1, sizeof(Cell));
  for (Region *r = m->regions; r < m->regions + m->n_regions; r++) r->cells = calloc((r->end - r->begin) / r->grain + 1, sizeof(Cell));
  for (int i = 0; i < n; i++) warps[i].index = i, warps[i].file = aligned_alloc(256, (layout->file_bytes + 255) / 256 * 256);
  arrange(which, programs, order, &state);
  for (int p = 0; p < programs; p++) {
    m->program = which[p] + 1, m->epoch++;
    memset(m->shared, 0xa5, m->shared_bytes);
    for (int i = 0; i < n; i++) {
      Warp *w = warps + i;
      memset(w->file, 0xa5, layout->constants);
      memcpy(w->file + layout->constants, constants, layout->file_bytes - layout->constants);
      memset(w->pc, 0, sizeof w->pc), memset(w->group, 0, sizeof w->group);
      w->running = ~0u, w->waiting = 0, w->copies = 0;
      for (int l = 0; l < LANES; l++) {
        ((u32 *)(w->file + layout->thread))[l] = (u32)(i * LANES + l);
        ((u32 *)(w->file + layout->program))[l] = (u32)which[p];
      }
    }
    do {
      arrange(turn, n, order, &state);
      for (int i = 0; i < n; i++) run_warp(m, warps + turn[i]);
    } while (pass_barrier(m, warps, n));
  }
  for (int i = 0; i < n; i++) free(warps[i].file), free(warps[i].copy);
  for (Region *r = m->regions; r < m->regions + m->n_regions; r++) free(r->cells);
  free(warps), free(turn), free(which), free(m->shared), free(m->shared_cells);
}
