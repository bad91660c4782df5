// AMX for processors without it: a handler of SIGILL that executes the tile instructions of matmuls_amx.cpp, as its compiler wrote
// them, on registers in memory. Loads and stores go where those of the processor would, so guard pages catch them.
#include <immintrin.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <atomic>

namespace {

constexpr int ROWS = 16, BYTES = 64;

struct State {
    bool configured = false;
    alignas(64) uint8_t tile[8][ROWS][BYTES];
};
thread_local State* state = nullptr;  // the reserve for thread-local memory of loaded libraries has no room for the tiles themselves
std::atomic<long> executed{0}, configured{0};  // instructions; threads that have not released their tiles

// Faults of a processor, for tests of the comparison before the first use.
enum Fault { NO_FAULT, SUMS_ARE_REPLACED, LAST_PAIR_IS_LEFT_OUT, ODD_ELEMENTS_ARE_LEFT_OUT, LAST_ROW_IS_NOT_STORED, SUMS_ARE_ROUNDED_TO_BF16 };
std::atomic<int> fault{NO_FAULT};

[[noreturn]] void fail(const char* why) {
    fprintf(stderr, "amx_emulator: %s\n", why);
    abort();
}

struct Instruction {
    const uint8_t* at;
    int rex_r, rex_x, rex_b, vvvv, prefix;  // prefix: 0 none, 1 66, 2 F3, 3 F2
    uint8_t opcode, modrm;
    int tile() const { return modrm >> 3 & 7; }
    bool of_registers() const { return modrm >> 6 == 3; }
};

int64_t general(const gregset_t& registers, int number) {
    static const int order[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return registers[order[number]];
}

struct Address {
    uint8_t* base;
    int64_t stride;  // index * scale, of tile loads and stores
    int length;      // of the instruction
};

Address address_of(const Instruction& i, const gregset_t& registers) {
    const uint8_t* p = i.at + 5;
    const int mode = i.modrm >> 6, rm = i.modrm & 7;
    int64_t base = 0, stride = 0;
    bool has_base = true, from_next = false;
    if (rm == 4) {
        const int scale = *p >> 6, index = (*p >> 3 & 7) | i.rex_x << 3, number = *p & 7;
        p++;
        if (index != 4) stride = general(registers, index) << scale;
        has_base = !(number == 5 && mode == 0);
        if (has_base) base = general(registers, number | i.rex_b << 3);
    } else if (rm == 5 && mode == 0) {
        has_base = false, from_next = true;
    } else {
        base = general(registers, rm | i.rex_b << 3);
    }
    int64_t shift = 0;
    if (mode == 1) {
        shift = int8_t(*p++);
    } else if (mode == 2 || !has_base) {
        int32_t wide;
        memcpy(&wide, p, 4);
        shift = wide, p += 4;
    }
    if (from_next) base = reinterpret_cast<int64_t>(p);
    return {reinterpret_cast<uint8_t*>(base + shift), stride, int(p - i.at)};
}

void configure(const uint8_t* from) {
    if (from[0] != 1 || from[1] != 0) fail("a configuration that is not of palette 1 from row 0 on");
    for (int k = 2; k < 16; k++) {
        if (from[k]) fail("reserved bytes of a configuration are not 0");
    }
    for (int t = 0; t < 8; t++) {
        if (from[16 + 2 * t] != BYTES || from[17 + 2 * t] || from[48 + t] != ROWS) fail("tiles that are not 16 rows of 64 bytes");
        if (from[32 + 2 * t] || from[33 + 2 * t] || from[56 + t]) fail("more than 8 tiles");
    }
    if (!state->configured) configured++;
    state->configured = true;
    memset(state->tile, 0, sizeof state->tile);
}

// Even and odd elements of the inner dimension are summed apart, then added to the tile: the order of Intel's description.
__attribute__((target("avx512f"))) void multiply(int to, int left, int right) {
    for (int m = 0; m < ROWS; m++) {
        __m512 even = _mm512_setzero_ps(), odd = even;
        for (int k = 0; k < (fault == LAST_PAIR_IS_LEFT_OUT ? ROWS - 1 : ROWS); k++) {
            uint32_t pair;
            memcpy(&pair, state->tile[left][m] + 4 * k, 4);
            const __m512i column = _mm512_load_si512(state->tile[right][k]);
            const __m512 a = _mm512_castsi512_ps(_mm512_set1_epi32(int(pair << 16)));
            const __m512 b = _mm512_castsi512_ps(_mm512_set1_epi32(int(pair & 0xffff0000u)));
            even = _mm512_fmadd_ps(a, _mm512_castsi512_ps(_mm512_slli_epi32(column, 16)), even);
            odd = _mm512_fmadd_ps(b, _mm512_castsi512_ps(_mm512_and_epi32(column, _mm512_set1_epi32(int(0xffff0000u)))), odd);
        }
        float* row = reinterpret_cast<float*>(state->tile[to][m]);
        __m512 sum = fault == ODD_ELEMENTS_ARE_LEFT_OUT ? even : _mm512_add_ps(even, odd);
        if (fault != SUMS_ARE_REPLACED) sum = _mm512_add_ps(_mm512_load_ps(row), sum);
        if (fault == SUMS_ARE_ROUNDED_TO_BF16) {
            sum = _mm512_castsi512_ps(_mm512_and_epi32(_mm512_castps_si512(sum), _mm512_set1_epi32(int(0xffff0000u))));
        }
        _mm512_store_ps(row, sum);
    }
}

// Executes the instruction and returns its length; 0 if it is none of tiles.
int execute(const Instruction& i, const gregset_t& registers) {
    if (i.opcode == 0x49 && i.prefix == 0 && i.of_registers() && i.modrm == 0xc0) {  // tilerelease
        if (state->configured) configured--;
        state->configured = false;
        return 5;
    }
    if (i.opcode == 0x49 && i.prefix == 0 && !i.of_registers() && i.tile() == 0) {  // ldtilecfg
        const Address from = address_of(i, registers);
        configure(from.base);
        return from.length;
    }
    const bool is_zero = i.opcode == 0x49 && i.prefix == 3 && i.of_registers();
    const bool is_product = i.opcode == 0x5c && i.prefix == 2 && i.of_registers();
    const bool is_access = i.opcode == 0x4b && i.prefix != 0 && !i.of_registers();
    if (!is_zero && !is_product && !is_access) return 0;
    if (!state->configured) fail("a tile instruction without a configuration");
    if (is_zero) {
        memset(state->tile[i.tile()], 0, sizeof state->tile[0]);
        return 5;
    }
    if (is_product) {  // tdpbf16ps
        if (i.tile() == (i.modrm & 7) || i.tile() == i.vvvv || (i.modrm & 7) == i.vvvv) fail("a product of one tile twice");
        multiply(i.tile(), i.modrm & 7, i.vvvv);
        return 5;
    }
    const Address at = address_of(i, registers);
    for (int r = 0; r < ROWS; r++) {
        uint8_t *row = state->tile[i.tile()][r], *memory = at.base + r * at.stride;
        if (i.prefix != 2) memcpy(row, memory, BYTES);                                             // tileloadd, tileloaddt1
        else if (fault != LAST_ROW_IS_NOT_STORED || r + 1 < ROWS) memcpy(memory, row, BYTES);  // tilestored
    }
    return at.length;
}

bool is_of_tiles(const uint8_t* p) {
    return p[0] == 0xc4 && (p[1] & 0x1f) == 2 && !(p[2] & 0x84) && (p[3] == 0x49 || p[3] == 0x4b || p[3] == 0x5c);
}

void handle(int, siginfo_t*, void* context) {
    gregset_t& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    const uint8_t* p = reinterpret_cast<const uint8_t*>(registers[REG_RIP]);
    if (!is_of_tiles(p)) fail("an instruction that is not one of tiles");
    if (!state) state = new State;  // no allocation is going on: the thread stands at a tile instruction
    _mm_setcsr(0x9fc0);             // denormals are 0, results are rounded to nearest, no exceptions: whatever the thread had
    for (; is_of_tiles(p); p = reinterpret_cast<const uint8_t*>(registers[REG_RIP])) {  // those that follow spare a signal each
        const Instruction i{p, !(p[1] & 0x80), !(p[1] & 0x40), !(p[1] & 0x20), ~(p[2] >> 3) & 15, p[2] & 3, p[3], p[4]};
        const int length = i.rex_r ? 0 : execute(i, registers);
        if (!length) fail("an instruction that is not one of tiles");
        registers[REG_RIP] += length;
        executed++;
    }
}

}  // namespace

extern "C" long amx_executed() { return executed; }
extern "C" long amx_configured() { return configured; }
extern "C" void amx_break(int kind) { fault = kind; }

extern "C" int amx_install() {
    struct sigaction action = {};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    return sigaction(SIGILL, &action, nullptr);
}
