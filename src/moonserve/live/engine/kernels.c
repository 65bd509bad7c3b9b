// Decode of a llama-like model in float32, from weights of 4 or 8 bits, for a few tokens a pass.
//
// live/engine/kernels.py compiles this file, and calls it. A weight is codes * scale + least, with
// one scale and one least for each 32 inputs of an output, as GGUF stores Q4_0, Q4_1 and Q8_0.
// All arithmetic is in float32. A row's result never depends on the other rows of its pass.
//
// Matrices lie in tiles of 32 outputs: codes [outputs / 32][inputs / PER][32], where one uint32
// holds PER successive inputs of one output (8 of 4 bits, or 4 of 8 bits; the first one lowest), and
// scales [outputs / 32][inputs / 32][2][32], first the scales and then the leasts.

#include <math.h>
#include <stdint.h>
#include <string.h>

#define TILE 32
#define GROUP 32
#define WIDE 8
#define AHEAD 512 // words that are fetched ahead of their use: 2 KiB
#define ROWS 2 // rows that share one read of the weights

typedef float Floats __attribute__((vector_size(WIDE * 4), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(WIDE * 4), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(WIDE * 4), aligned(4)));
#define FLOATS(words) __builtin_convertvector((Ints)(words), Floats)

typedef struct {
    const uint32_t *codes;
    const float *scales;
    const float *bias; // NULL: none
    int64_t outputs, inputs, bits;
} Matrix;

typedef struct {
    const float *attn_norm, *mlp_norm;
    Matrix qkv, out, gate_up, down;
} Layer;

typedef struct {
    const Layer *layers;
    const float *cos, *sin; // [positions][head_dim], both halves; sin has its first half negated
    float *pool;            // [blocks][layers][2][block_size][kv_heads][head_dim]
    int64_t layer_count, hidden, heads, kv_heads, head_dim, block_size;
    float norm_eps;
} Model;

typedef struct {
    int64_t rows, width;     // width: blocks of a row's table
    float *hidden;           // [rows][hidden]
    const int64_t *positions; // [rows]
    const int64_t *blocks;   // [rows][width]
    float *normed, *wide, *mixed, *ready, *sums; // room for one value of each row
    float *scores;           // [rows][heads][width * block_size]
} Step;

static Floats load(const float *at) { return *(const Floats *)at; }

static float sum(Floats v) {
    return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7]));
}

// The rows as `tiles` reads them: the codes stay where they are in a word, so that the input of the
// code at bit b is divided by 2^b, which is exact. sums: of each group of 32 inputs.
static void prepare(const float *x, int64_t rows, int64_t inputs, int64_t bits, float *ready, float *sums) {
#pragma omp for schedule(static)
    for (int64_t group = 0; group < rows * inputs / GROUP; group++) {
        const float *from = x + group * GROUP;
        float total = 0;
        for (int i = 0; i < GROUP; i++) {
            int place = bits == 4 ? i % 4 * 4 : i % 4 == 3 ? 0 : i % 4 * 8;
            ready[group * GROUP + i] = from[i] / (float)(1 << place);
            total += from[i];
        }
        sums[group] = total;
    }
}

// One tile of outputs, for `rows` of at most ROWS rows; rows and bits are constants where it is used.
static inline __attribute__((always_inline)) void tile(
    const Matrix *m, int64_t at, const int rows, const int bits, const float *ready, const float *sums,
    float *y
) {
    const int per = 32 / bits;
    const int64_t groups = m->inputs / GROUP;
    const uint32_t *codes = m->codes + at * (m->inputs / per) * TILE;
    const float *scales = m->scales + at * groups * 2 * TILE;
    Floats total[ROWS][TILE / WIDE] = {0};
    for (int64_t group = 0; group < groups; group++, scales += 2 * TILE) {
        Floats part[ROWS][TILE / WIDE] = {0};
        for (int word = 0; word < GROUP / per; word++, codes += TILE) {
            const float *x = ready + group * GROUP + word * per;
            __builtin_prefetch(codes + AHEAD);
            __builtin_prefetch(codes + AHEAD + TILE / 2);
            for (int lane = 0; lane < TILE / WIDE; lane++) {
                Words v = *(const Words *)(codes + lane * WIDE);
#define CODE(i, of)                                                                                \
    {                                                                                              \
        Floats w = FLOATS(of);                                                                     \
        for (int row = 0; row < rows; row++) part[row][lane] += w * x[row * m->inputs + (i)];      \
    }
                if (bits == 4) {
                    CODE(0, v & 0xf) CODE(1, v & 0xf0) CODE(2, v & 0xf00) CODE(3, v & 0xf000)
                    v >>= 16;
                    CODE(4, v & 0xf) CODE(5, v & 0xf0) CODE(6, v & 0xf00) CODE(7, v & 0xf000)
                } else {
                    CODE(0, v & 0xff) CODE(1, v & 0xff00) CODE(2, v & 0xff0000) CODE(3, v >> 24)
                }
#undef CODE
            }
        }
        for (int lane = 0; lane < TILE / WIDE; lane++) {
            Floats scale = load(scales + lane * WIDE);
            Floats least = load(scales + TILE + lane * WIDE);
            for (int row = 0; row < rows; row++) {
                total[row][lane] += scale * part[row][lane] + least * sums[row * groups + group];
            }
        }
    }
    for (int row = 0; row < rows; row++) {
        for (int lane = 0; lane < TILE / WIDE; lane++) {
            Floats v = total[row][lane];
            if (m->bias) v += load(m->bias + at * TILE + lane * WIDE);
            *(Floats *)(y + row * m->outputs + at * TILE + lane * WIDE) = v;
        }
    }
}

// y [rows][outputs] = x [rows][inputs] times the matrix. Threads of a parallel region share it.
static void multiply(const Matrix *m, const float *x, int64_t rows, float *ready, float *sums, float *y) {
    prepare(x, rows, m->inputs, m->bits, ready, sums);
    const int64_t tiles = m->outputs / TILE;
    const int64_t bunches = (rows + ROWS - 1) / ROWS;
#pragma omp for schedule(static)
    for (int64_t job = 0; job < tiles * bunches; job++) {
        int64_t at = job / bunches;
        int64_t row = job % bunches * ROWS;
        const float *r = ready + row * m->inputs;
        const float *s = sums + row * (m->inputs / GROUP);
        float *to = y + row * m->outputs;
        if (m->bits == 4) {
            if (row + 1 < rows) tile(m, at, 2, 4, r, s, to);
            else tile(m, at, 1, 4, r, s, to);
        } else {
            if (row + 1 < rows) tile(m, at, 2, 8, r, s, to);
            else tile(m, at, 1, 8, r, s, to);
        }
    }
}

static void rms_norm(const float *x, const float *weight, int64_t rows, int64_t width, float eps, float *y) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * width;
        Floats squares = {0};
        for (int64_t i = 0; i < width; i += WIDE) squares += load(from + i) * load(from + i);
        float scale = 1 / sqrtf(sum(squares) / (float)width + eps);
        for (int64_t i = 0; i < width; i++) y[row * width + i] = from[i] * scale * weight[i];
    }
}

static void rotate(float *head, const float *cos, const float *sin, int64_t dim) {
    int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float low = head[i];
        float high = head[i + half];
        head[i] = low * cos[i] + high * sin[i];
        head[i + half] = high * cos[i + half] + low * sin[i + half];
    }
}

// Rotate queries and keys, write the new keys and values, and attend to all until then. qkv is
// [rows][heads + 2 * kv_heads][head_dim].
static void attend(const Model *m, const Step *s, int64_t layer, float *qkv) {
    const int64_t dim = m->head_dim;
    const int64_t shared = m->heads / m->kv_heads;
    const int64_t width = (m->heads + 2 * m->kv_heads) * dim;
    const int64_t step = m->kv_heads * dim; // from one token to the next
    const int64_t half = m->block_size * step; // from keys to values
#pragma omp for schedule(static) collapse(2)
    for (int64_t row = 0; row < s->rows; row++) {
        for (int64_t kv = 0; kv < m->kv_heads; kv++) {
            const int64_t position = s->positions[row];
            const int64_t *blocks = s->blocks + row * s->width;
            const float *cos = m->cos + position * dim;
            const float *sin = m->sin + position * dim;
            float *queries = qkv + row * width + kv * shared * dim;
            float *key = qkv + row * width + (m->heads + kv) * dim;
            const float *value = key + m->kv_heads * dim;
            float *scores = s->scores + (row * m->heads + kv * shared) * s->width * m->block_size;
            const int64_t reach = s->width * m->block_size; // from one head's scores to the next's
            for (int64_t q = 0; q < shared; q++) rotate(queries + q * dim, cos, sin, dim);
            rotate(key, cos, sin, dim);
            int64_t block = blocks[position / m->block_size];
            float *at = m->pool + (block * m->layer_count + layer) * 2 * half
                        + position % m->block_size * step + kv * dim;
            memcpy(at, key, dim * sizeof(float));
            memcpy(at + half, value, dim * sizeof(float));
            for (int64_t token = 0; token <= position; token++) {
                block = blocks[token / m->block_size];
                at = m->pool + (block * m->layer_count + layer) * 2 * half
                     + token % m->block_size * step + kv * dim;
                for (int64_t q = 0; q < shared; q++) {
                    Floats dot = {0};
                    for (int64_t i = 0; i < dim; i += WIDE) dot += load(queries + q * dim + i) * load(at + i);
                    scores[q * reach + token] = sum(dot) / sqrtf((float)dim);
                }
            }
            float *mixed = s->mixed + (row * m->heads + kv * shared) * dim;
            memset(mixed, 0, shared * dim * sizeof(float));
            for (int64_t q = 0; q < shared; q++) {
                float *score = scores + q * reach;
                float most = -INFINITY;
                float total = 0;
                for (int64_t token = 0; token <= position; token++) most = fmaxf(most, score[token]);
                for (int64_t token = 0; token <= position; token++) {
                    score[token] = expf(score[token] - most);
                    total += score[token];
                }
                for (int64_t token = 0; token <= position; token++) score[token] /= total;
            }
            for (int64_t token = 0; token <= position; token++) {
                block = blocks[token / m->block_size];
                at = m->pool + (block * m->layer_count + layer) * 2 * half + half
                     + token % m->block_size * step + kv * dim;
                for (int64_t q = 0; q < shared; q++) {
                    float share = scores[q * reach + token];
                    for (int64_t i = 0; i < dim; i += WIDE) {
                        *(Floats *)(mixed + q * dim + i) += share * load(at + i);
                    }
                }
            }
        }
    }
}

static void add(float *to, const float *from, int64_t count) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count; i++) to[i] += from[i];
}

// gate_up [rows][2][width] becomes silu(gate) * up [rows][width] in `to`.
static void activate(const float *gate_up, int64_t rows, int64_t width, float *to) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows * width; i++) {
        const float *gate = gate_up + i / width * 2 * width + i % width;
        to[i] = *gate / (1 + expf(-*gate)) * gate[width];
    }
}

// Run all layers: `hidden` goes in as embeddings and comes out before the last norm.
void moonserve_decode(const Model *m, const Step *s, int threads) {
#pragma omp parallel num_threads(threads)
    for (int64_t index = 0; index < m->layer_count; index++) {
        const Layer *layer = m->layers + index;
        rms_norm(s->hidden, layer->attn_norm, s->rows, m->hidden, m->norm_eps, s->normed);
        multiply(&layer->qkv, s->normed, s->rows, s->ready, s->sums, s->wide);
        attend(m, s, index, s->wide);
        multiply(&layer->out, s->mixed, s->rows, s->ready, s->sums, s->normed);
        add(s->hidden, s->normed, s->rows * m->hidden);
        rms_norm(s->hidden, layer->mlp_norm, s->rows, m->hidden, m->norm_eps, s->normed);
        multiply(&layer->gate_up, s->normed, s->rows, s->ready, s->sums, s->wide);
        activate(s->wide, s->rows, layer->down.inputs, s->mixed);
        multiply(&layer->down, s->mixed, s->rows, s->ready, s->sums, s->normed);
        add(s->hidden, s->normed, s->rows * m->hidden);
    }
}

// y [rows][outputs] = x times the matrix; ready and sums are room for rows * inputs floats.
void moonserve_multiply(const Matrix *m, const float *x, int64_t rows, float *ready, float *sums, float *y, int threads) {
#pragma omp parallel num_threads(threads)
    multiply(m, x, rows, ready, sums, y);
}

// Write the matrix as floats [outputs][inputs].
void moonserve_unpack(const Matrix *m, float *y, int threads) {
    const int64_t per = 32 / m->bits;
    const int64_t groups = m->inputs / GROUP;
    const uint32_t mask = m->bits == 4 ? 0xf : 0xff;
    const Words shift = m->bits == 4 ? (Words){0, 4, 8, 12, 16, 20, 24, 28}
                                     : (Words){0, 8, 16, 24, 0, 8, 16, 24};
    const int64_t second = m->bits == 4 ? 0 : TILE; // where the last four of eight codes are
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t output = 0; output < m->outputs; output++) {
        const int64_t at = output / TILE;
        const uint32_t *codes = m->codes + at * (m->inputs / per) * TILE + output % TILE;
        const float *scales = m->scales + at * groups * 2 * TILE + output % TILE;
        float *to = y + output * m->inputs;
        for (int64_t group = 0; group < groups; group++, scales += 2 * TILE) {
            for (int i = 0; i < GROUP; i += WIDE, codes += WIDE / per * TILE, to += WIDE) {
                const uint32_t a = codes[0];
                const uint32_t b = codes[second];
                const Words words = (Words){a, a, a, a, b, b, b, b} >> shift & mask;
                *(Floats *)to = FLOATS(words) * scales[0] + scales[TILE];
            }
        }
    }
}
