/* A pretend NVIDIA driver for tests: device memory is host memory, pictures come from files.
 *
 * Built three times (libcuda.so.1, libnvcuvid.so.1, libnvidia-encode.so.1) by tests/fake_driver,
 * so that PyAV's and PyNvVideoCodec's own code runs on a machine without a GPU. It shows what the
 * wrappers do, never what silicon does. Structures are described by offset, as our own accessors.
 *
 * A picture is named by the FNV-1a hash of its slices, each with the start code 00 00 01; its
 * samples are the file $KVF_FAKE_PICTURES/HASH (three planes, tight). Freed or unmapped memory is
 * filled with 0xDD, so that late use changes the digest of what is read.
 *
 * Environment: KVF_FAKE_OFF (cuInit fails), KVF_FAKE_ENGINES, KVF_FAKE_FORMATS (bit 0: 4:0:0, 1: 4:2:0,
 * 3: 4:4:4 of 8 bits), KVF_FAKE_MASK (output formats), KVF_FAKE_MIN, KVF_FAKE_MAX (picture side),
 * KVF_FAKE_DELAY (pictures that the parser holds back), KVF_FAKE_FAIL: create, decode:N, map:N,
 * reset:N (all calls fail from the Nth picture on), corrupt:N (the first sample of the Nth is wrong).
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t u64;
typedef uint32_t u32;
typedef uint8_t u8;

#define EXPORT __attribute__((visibility("default")))
#define OK 0
#define INVALID 1
#define OUT_OF_MEMORY 2
#define NO_DEVICE 100
#define ILLEGAL 700
#define UNSUPPORTED 801
#define UNKNOWN 999
#define PITCH_UNIT 512

static u64 at(const void *base, int offset) { u64 v; memcpy(&v, (const u8 *)base + offset, 8); return v; }
static u32 at32(const void *base, int offset) { u32 v; memcpy(&v, (const u8 *)base + offset, 4); return v; }
static void set32(void *base, int offset, u32 v) { memcpy((u8 *)base + offset, &v, 4); }
static void set16(void *base, int offset, uint16_t v) { memcpy((u8 *)base + offset, &v, 2); }
static void set64(void *base, int offset, u64 v) { memcpy((u8 *)base + offset, &v, 8); }

static int number(const char *name, int otherwise) {
  const char *text = getenv(name);
  return text && *text ? atoi(text) : otherwise;
}

static int fails(const char *what, int count) {
  const char *text = getenv("KVF_FAKE_FAIL");
  size_t size = strlen(what);
  if (!text || strncmp(text, what, size)) return 0;
  return text[size] == ':' ? atoi(text + size + 1) == count : text[size] == 0;
}

/* ---- counters, read by tests ---------------------------------------------------------------- */
static struct { const char *name; long value; } counters[] = {
    {"allocations", 0}, {"bytes", 0}, {"peak_bytes", 0}, {"to_host", 0}, {"copies_2d", 0},
    {"decoders", 0}, {"decoders_live", 0}, {"pictures", 0}, {"mapped", 0}, {"mapped_peak", 0},
    {"parsers_live", 0}, {"bad_free", 0}};

EXPORT long *kvf_fake_counter(const char *name) {
  for (size_t i = 0; i < sizeof counters / sizeof *counters; i++)
    if (!strcmp(counters[i].name, name)) return &counters[i].value;
  return NULL;
}
static long count(const char *name, long by) { return __sync_add_and_fetch(kvf_fake_counter(name), by); }
static void peak(const char *name, long value) {
  long *highest = kvf_fake_counter(name);
  if (value > *highest) *highest = value;
}

#ifdef FAKE_CUDA
/* ---- libcuda: one device, one primary context, host memory ---------------------------------- */
static int context_object;
static __thread void *stack[16];
static __thread int depth;
static int device_lost(void) { return getenv("KVF_FAKE_LOST") != NULL; }

EXPORT int cuInit(unsigned f) { (void)f; return getenv("KVF_FAKE_OFF") ? NO_DEVICE : OK; }
EXPORT int cuDriverGetVersion(int *v) { *v = 13000; return OK; }
EXPORT int cuDeviceGetCount(int *n) { *n = 1; return OK; }
EXPORT int cuDeviceGet(int *d, int i) { *d = i; return i == 0 ? OK : 101; }
EXPORT int cuDeviceGetName(char *s, int n, int d) { (void)d; snprintf(s, (size_t)n, "Fake GPU"); return OK; }
EXPORT int cuDeviceGetAttribute(int *v, int a, int d) { (void)d; *v = a == 14 ? PITCH_UNIT : a == 75 ? 9 : 0; return OK; }
EXPORT int cuDeviceComputeCapability(int *a, int *b, int d) { (void)d; *a = 9; *b = 0; return OK; }
EXPORT int cuDeviceTotalMem_v2(size_t *n, int d) { (void)d; *n = (size_t)8 << 30; return OK; }
EXPORT int cuDevicePrimaryCtxRetain(void **c, int d) { (void)d; *c = &context_object; return device_lost() ? ILLEGAL : OK; }
EXPORT int cuDevicePrimaryCtxRelease_v2(int d) { (void)d; return OK; }
EXPORT int cuDevicePrimaryCtxRelease(int d) { (void)d; return OK; }
EXPORT int cuDevicePrimaryCtxReset(int d) { (void)d; return OK; }
EXPORT int cuDevicePrimaryCtxSetFlags(int d, unsigned f) { (void)d; (void)f; return OK; }
/* Active with the flags that torch leaves: what makes FFmpeg refuse to own the context. */
EXPORT int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *a) { (void)d; *f = 0; *a = 1; return OK; }
EXPORT int cuCtxCreate_v2(void **c, unsigned f, int d) { (void)f; (void)d; *c = &context_object; return OK; }
EXPORT int cuCtxDestroy_v2(void *c) { (void)c; return OK; }
EXPORT int cuCtxSetLimit(int l, size_t v) { (void)l; (void)v; return OK; }
EXPORT int cuCtxPushCurrent_v2(void *c) { if (depth > 15) return INVALID; stack[depth++] = c; return OK; }
EXPORT int cuCtxPopCurrent_v2(void **c) { if (!depth) return 201; depth--; if (c) *c = stack[depth]; return OK; }
EXPORT int cuCtxSetCurrent(void *c) { if (depth) stack[depth - 1] = c; else stack[depth++] = c; return OK; }
EXPORT int cuCtxGetCurrent(void **c) { *c = depth ? stack[depth - 1] : NULL; return OK; }
EXPORT int cuCtxGetDevice(int *d) { *d = 0; return depth ? OK : 201; }
EXPORT int cuCtxSynchronize(void) { return OK; }
EXPORT int cuGetErrorName(int e, const char **s) { *s = e == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_FAKE"; return OK; }
EXPORT int cuGetErrorString(int e, const char **s) { *s = e == NO_DEVICE ? "no CUDA-capable device" : "an error of the fake driver"; return OK; }

static int allocate(u64 *p, size_t n) {
  u8 *raw = aligned_alloc(PITCH_UNIT, (n + 2 * PITCH_UNIT - 1) / PITCH_UNIT * PITCH_UNIT + PITCH_UNIT);
  if (!raw) return OUT_OF_MEMORY;
  memcpy(raw, &n, sizeof n);
  memcpy(raw + 8, "KVFALIVE", 8);
  memset(raw + PITCH_UNIT, 0xAA, n);
  *p = (u64)(uintptr_t)(raw + PITCH_UNIT);
  count("allocations", 1);
  peak("peak_bytes", count("bytes", (long)n));
  return OK;
}
EXPORT int cuMemAlloc_v2(u64 *p, size_t n) { return device_lost() ? ILLEGAL : allocate(p, n); }
EXPORT int cuMemAllocAsync(u64 *p, size_t n, void *s) { (void)s; return cuMemAlloc_v2(p, n); }
EXPORT int cuMemAllocManaged(u64 *p, size_t n, unsigned f) { (void)f; return cuMemAlloc_v2(p, n); }
EXPORT int cuMemAllocPitch_v2(u64 *p, size_t *pitch, size_t w, size_t h, unsigned e) {
  (void)e;
  *pitch = (w + PITCH_UNIT - 1) / PITCH_UNIT * PITCH_UNIT;
  return cuMemAlloc_v2(p, *pitch * h);
}
/* Freed memory is poisoned and kept, so that a late reader gets 0xDD and not a crash. */
EXPORT int cuMemFree_v2(u64 p) {
  size_t n;
  u8 *raw = (u8 *)(uintptr_t)p - PITCH_UNIT;
  if (!p) return OK;
  if (memcmp(raw + 8, "KVFALIVE", 8)) { count("bad_free", 1); return INVALID; }
  memcpy(&n, raw, sizeof n);
  memcpy(raw + 8, "KVFDEAD!", 8);
  memset(raw + PITCH_UNIT, 0xDD, n);
  count("bytes", -(long)n);
  return OK;
}
EXPORT int cuMemFreeAsync(u64 p, void *s) { (void)s; return cuMemFree_v2(p); }
EXPORT int cuMemsetD8Async(u64 p, u8 v, size_t n, void *s) { (void)s; memset((void *)(uintptr_t)p, v, n); return OK; }
static int copy(u64 d, u64 s, size_t n) { memcpy((void *)(uintptr_t)d, (void *)(uintptr_t)s, n); return OK; }
EXPORT int cuMemcpy(u64 d, u64 s, size_t n) { return copy(d, s, n); }
EXPORT int cuMemcpyAsync(u64 d, u64 s, size_t n, void *q) { (void)q; return copy(d, s, n); }
EXPORT int cuMemcpyHtoD_v2(u64 d, const void *s, size_t n) { return copy(d, (u64)(uintptr_t)s, n); }
EXPORT int cuMemcpyHtoDAsync_v2(u64 d, const void *s, size_t n, void *q) { (void)q; return copy(d, (u64)(uintptr_t)s, n); }
EXPORT int cuMemcpyDtoH_v2(void *d, u64 s, size_t n) { count("to_host", 1); return copy((u64)(uintptr_t)d, s, n); }
EXPORT int cuMemcpyDtoHAsync_v2(void *d, u64 s, size_t n, void *q) { (void)q; return cuMemcpyDtoH_v2(d, s, n); }
EXPORT int cuMemcpyDtoD_v2(u64 d, u64 s, size_t n) { return copy(d, s, n); }
EXPORT int cuMemcpyDtoDAsync_v2(u64 d, u64 s, size_t n, void *q) { (void)q; return copy(d, s, n); }
EXPORT int cuMemcpy2D_v2(const void *m) {
  int from_host = at32(m, 16) == 1, to_host = at32(m, 72) == 1;
  u8 *s = (u8 *)(uintptr_t)(from_host ? at(m, 24) : at(m, 32));
  u8 *d = (u8 *)(uintptr_t)(to_host ? at(m, 80) : at(m, 88));
  u64 s_pitch = at(m, 48), d_pitch = at(m, 104), width = at(m, 112), height = at(m, 120);
  if (!s || !d || device_lost()) return ILLEGAL;
  s += at(m, 8) * s_pitch + at(m, 0);
  d += at(m, 64) * d_pitch + at(m, 56);
  for (u64 y = 0; y < height; y++) memcpy(d + y * d_pitch, s + y * s_pitch, width);
  count("copies_2d", 1);
  if (to_host) count("to_host", 1);
  return OK;
}
EXPORT int cuMemcpy2DAsync_v2(const void *m, void *s) { (void)s; return cuMemcpy2D_v2(m); }
EXPORT int cuStreamCreate(void **s, unsigned f) { (void)f; *s = malloc(8); return OK; }
EXPORT int cuStreamDestroy_v2(void *s) { free(s); return OK; }
EXPORT int cuStreamSynchronize(void *s) { (void)s; return OK; }
EXPORT int cuStreamQuery(void *s) { (void)s; return OK; }
EXPORT int cuStreamGetCtx(void *s, void **c) { (void)s; *c = &context_object; return OK; }
EXPORT int cuStreamAddCallback(void *s, void (*f)(void *, int, void *), void *a, unsigned g) { (void)g; f(s, 0, a); return OK; }
EXPORT int cuStreamWaitEvent(void *s, void *e, unsigned f) { (void)s; (void)e; (void)f; return OK; }
EXPORT int cuEventCreate(void **e, unsigned f) { (void)f; *e = malloc(8); return OK; }
EXPORT int cuEventDestroy_v2(void *e) { free(e); return OK; }
EXPORT int cuEventRecord(void *e, void *s) { (void)e; (void)s; return OK; }
EXPORT int cuEventSynchronize(void *e) { (void)e; return OK; }
EXPORT int cuEventQuery(void *e) { (void)e; return OK; }
EXPORT int cuPointerGetAttribute(void *v, int a, u64 p) { if (a == 1) *(void **)v = &context_object; else if (a == 2) *(int *)v = 2; else memcpy(v, &p, 8); return OK; }
EXPORT int cuDeviceGetUuid(void *u, int d) { (void)d; memset(u, 7, 16); return OK; }

#define REFUSED(name) EXPORT int name(void) { return UNSUPPORTED; }
REFUSED(cuLaunchKernel) REFUSED(cuLinkCreate) REFUSED(cuLinkAddData) REFUSED(cuLinkComplete)
REFUSED(cuLinkDestroy) REFUSED(cuModuleLoadData) REFUSED(cuModuleUnload) REFUSED(cuModuleGetFunction)
REFUSED(cuModuleGetGlobal) REFUSED(cuTexObjectCreate) REFUSED(cuTexObjectDestroy)
REFUSED(cuGLGetDevices_v2) REFUSED(cuGraphicsGLRegisterImage) REFUSED(cuGraphicsUnregisterResource)
REFUSED(cuGraphicsMapResources) REFUSED(cuGraphicsUnmapResources)
REFUSED(cuGraphicsSubResourceGetMappedArray) REFUSED(cuGraphicsResourceGetMappedPointer_v2)
REFUSED(cuImportExternalMemory) REFUSED(cuDestroyExternalMemory) REFUSED(cuExternalMemoryGetMappedBuffer)
REFUSED(cuExternalMemoryGetMappedMipmappedArray) REFUSED(cuMipmappedArrayGetLevel)
REFUSED(cuMipmappedArrayDestroy) REFUSED(cuImportExternalSemaphore) REFUSED(cuDestroyExternalSemaphore)
REFUSED(cuSignalExternalSemaphoresAsync) REFUSED(cuWaitExternalSemaphoresAsync)
REFUSED(cuArray3DCreate_v2) REFUSED(cuArrayCreate_v2) REFUSED(cuArrayDestroy)
REFUSED(cuDeviceGetByPCIBusId) REFUSED(cuDeviceGetPCIBusId) REFUSED(cuDeviceGetLuid)
#endif

#ifdef FAKE_CUVID
/* ---- libnvcuvid ------------------------------------------------------------------------------ */
#define SURFACES 32
struct decoder { u32 width, height, pitch; u8 *decoded[SURFACES]; u8 *mapped[64]; int pictures; };
static int pictures_of_process;

static int is_reset(void) {
  const char *text = getenv("KVF_FAKE_FAIL");
  return text && !strncmp(text, "reset:", 6) && pictures_of_process >= atoi(text + 6);
}

/* CUVIDDECODECAPS: codec 0, chroma 4, depth-8 8, supported 24, engines 25, output mask 26,
 * max width 28, max height 32, max macroblocks 36, min width 40, min height 42 */
EXPORT int cuvidGetDecoderCaps(void *caps) {
  int hevc = at32(caps, 0) == 8, chroma = (int)at32(caps, 4), depth = (int)at32(caps, 8);
  int good = hevc && depth == 0 && (number("KVF_FAKE_FORMATS", 10) >> chroma & 1);
  ((u8 *)caps)[24] = (u8)good;
  ((u8 *)caps)[25] = (u8)number("KVF_FAKE_ENGINES", 7);
  set16(caps, 26, (uint16_t)(good ? number("KVF_FAKE_MASK", chroma == 3 ? 4 : 1) : 0));
  set32(caps, 28, (u32)number("KVF_FAKE_MAX", 8192));
  set32(caps, 32, (u32)number("KVF_FAKE_MAX", 8192));
  set32(caps, 36, 262144);
  set16(caps, 40, (uint16_t)number("KVF_FAKE_MIN", 144));
  set16(caps, 42, (uint16_t)number("KVF_FAKE_MIN", 144));
  return OK;
}

/* CUVIDDECODECREATEINFO: width 0, height 8, surfaces 16 (unsigned longs) */
EXPORT int cuvidCreateDecoder(void **out, const void *info) {
  struct decoder *d;
  if (fails("create", 1) || is_reset()) return OUT_OF_MEMORY;
  d = calloc(1, sizeof *d);
  d->width = (u32)at(info, 0);
  d->height = (u32)at(info, 8);
  d->pitch = (d->width + PITCH_UNIT - 1) / PITCH_UNIT * PITCH_UNIT;
  count("decoders", 1);
  count("decoders_live", 1);
  *out = d;
  return OK;
}
EXPORT int cuvidDestroyDecoder(void *handle) {
  struct decoder *d = handle;
  for (int i = 0; i < SURFACES; i++) free(d->decoded[i]);
  for (int i = 0; i < 64; i++)
    if (d->mapped[i]) { memset(d->mapped[i], 0xDD, (size_t)d->pitch * d->height * 3); count("mapped", -1); }
  free(d);
  count("decoders_live", -1);
  return OK;
}
EXPORT int cuvidReconfigureDecoder(void *d, void *i) { (void)d; (void)i; return INVALID; }
EXPORT int cuvidGetDecodeStatus(void *d, int i, void *s) { (void)d; (void)i; set32(s, 0, 2); return OK; }

static u64 hash_of(const u8 *data, size_t size) {
  u64 h = 14695981039346656037ull;
  for (size_t i = 0; i < size; i++) h = (h ^ data[i]) * 1099511628211ull;
  return h;
}

EXPORT u64 kvf_fake_hash(const u8 *data, size_t size) { return hash_of(data, size); }

/* CUVIDPICPARAMS: surface index 8, bitstream length 24, bitstream 32 */
EXPORT int cuvidDecodePicture(void *handle, const void *params) {
  struct decoder *d = handle;
  char path[4096];
  size_t plane = (size_t)d->width * d->height;
  u32 index = at32(params, 8);
  FILE *file;
  int number_of = __sync_add_and_fetch(&pictures_of_process, 1);
  d->pictures++;
  count("pictures", 1);
  if (is_reset()) return ILLEGAL;
  if (fails("decode", d->pictures)) return INVALID;
  if (index >= SURFACES) return INVALID;
  if ((int)d->width < number("KVF_FAKE_MIN", 144)) return INVALID;
  if (!d->decoded[index]) d->decoded[index] = malloc(3 * plane);
  memset(d->decoded[index], 0x55, 3 * plane);
  snprintf(path, sizeof path, "%s/%016llx", getenv("KVF_FAKE_PICTURES") ? getenv("KVF_FAKE_PICTURES") : ".",
           (unsigned long long)hash_of((const u8 *)(uintptr_t)at(params, 32), at32(params, 24)));
  file = fopen(path, "rb");
  if (file) {
    /* An unknown picture is "concealed": wrong samples, no error, as hardware does. */
    if (fread(d->decoded[index], 1, 3 * plane, file) != 3 * plane) number_of = 0;
    fclose(file);
  }
  if (fails("corrupt", d->pictures)) d->decoded[index][0] ^= 1;
  return number_of ? OK : UNKNOWN;
}
EXPORT int cuvidMapVideoFrame64(void *handle, int index, u64 *pointer, u32 *pitch, void *params) {
  struct decoder *d = handle;
  (void)params;
  if (is_reset()) return ILLEGAL;
  if (fails("map", d->pictures) || index < 0 || index >= SURFACES || !d->decoded[index]) return INVALID;
  for (int i = 0; i < 64; i++) {
    if (d->mapped[i]) continue;
    u8 *m = aligned_alloc(PITCH_UNIT, (size_t)d->pitch * d->height * 3);
    memset(m, 0xEE, (size_t)d->pitch * d->height * 3);
    for (u32 y = 0; y < 3 * d->height; y++)
      memcpy(m + (size_t)y * d->pitch, d->decoded[index] + (size_t)y * d->width, d->width);
    d->mapped[i] = m;
    *pointer = (u64)(uintptr_t)m;
    *pitch = d->pitch;
    peak("mapped_peak", count("mapped", 1));
    return OK;
  }
  return OUT_OF_MEMORY;
}
EXPORT int cuvidUnmapVideoFrame64(void *handle, u64 pointer) {
  struct decoder *d = handle;
  for (int i = 0; i < 64; i++)
    if ((u64)(uintptr_t)d->mapped[i] == pointer) {
      memset(d->mapped[i], 0xDD, (size_t)d->pitch * d->height * 3); /* poisoned, never reused */
      d->mapped[i] = NULL;
      count("mapped", -1);
      return OK;
    }
  return INVALID;
}
EXPORT int cuvidCtxLockCreate(void **l, void *c) { (void)c; *l = malloc(8); return OK; }
EXPORT int cuvidCtxLockDestroy(void *l) { free(l); return OK; }
EXPORT int cuvidCtxLock(void *l, unsigned f) { (void)l; (void)f; return OK; }
EXPORT int cuvidCtxUnlock(void *l, unsigned f) { (void)l; (void)f; return OK; }

/* ---- the parser: splits units, one picture for each slice that begins one ------------------- */
typedef int (*sequence_fn)(void *, void *);
typedef int (*picture_fn)(void *, void *);
struct parser {
  u32 surfaces, delay;
  void *user;
  sequence_fn sequence;
  picture_fn decode, display;
  u32 width, height;
  u8 *picture;
  size_t size;
  u32 next, held[64];
  int64_t stamp, stamps[64];
  int holds;
};

/* CUVIDPARSERPARAMS: surfaces 4, delay 16, user 40, sequence 48, decode 56, display 64 */
EXPORT int cuvidCreateVideoParser(void **out, const void *params) {
  struct parser *p = calloc(1, sizeof *p);
  p->surfaces = at32(params, 4);
  p->delay = at32(params, 16);
  p->user = (void *)(uintptr_t)at(params, 40);
  p->sequence = (sequence_fn)(uintptr_t)at(params, 48);
  p->decode = (picture_fn)(uintptr_t)at(params, 56);
  p->display = (picture_fn)(uintptr_t)at(params, 64);
  count("parsers_live", 1);
  *out = p;
  return OK;
}
EXPORT int cuvidDestroyVideoParser(void *handle) {
  struct parser *p = handle;
  free(p->picture);
  free(p);
  count("parsers_live", -1);
  return OK;
}

static u32 bit(const u8 *d, u32 *at_bit) { u32 v = d[*at_bit >> 3] >> (7 - (*at_bit & 7)) & 1; ++*at_bit; return v; }
static u32 golomb(const u8 *d, u32 *at_bit) {
  u32 zeros = 0, value = 1;
  while (!bit(d, at_bit) && zeros < 31) zeros++;
  for (u32 i = 0; i < zeros; i++) value = value << 1 | bit(d, at_bit);
  return value - 1;
}

static int display_first(struct parser *p) {
  u8 info[64] = {0}; /* CUVIDPARSERDISPINFO: surface 0, progressive 4, stamp 16 */
  set32(info, 0, p->held[0]);
  set32(info, 4, 1);
  set64(info, 16, (u64)p->stamps[0]);
  memmove(p->held, p->held + 1, sizeof *p->held * 63);
  memmove(p->stamps, p->stamps + 1, sizeof *p->stamps * 63);
  p->holds--;
  return p->display ? p->display(p->user, info) : 1;
}

static int finish_picture(struct parser *p) {
  static const u8 zero;
  u8 params[8192] = {0};
  u32 slice = 0;
  if (!p->size) return 1;
  set32(params, 8, p->next);
  set32(params, 24, (u32)p->size);
  set64(params, 32, (u64)(uintptr_t)p->picture);
  set32(params, 40, 1);
  set64(params, 48, (u64)(uintptr_t)(p->size ? (void *)&slice : (void *)&zero));
  p->size = 0;
  if (!p->decode(p->user, params)) return 0;
  p->held[p->holds] = p->next;
  p->stamps[p->holds++] = p->stamp;
  p->next = (p->next + 1) % (p->surfaces ? p->surfaces : 1);
  while (p->holds > (int)p->delay + number("KVF_FAKE_DELAY", 0))
    if (!display_first(p)) return 0;
  return 1;
}

static int read_sequence(struct parser *p, const u8 *unit, size_t size) {
  u8 plain[256] = {0}, format[256] = {0};
  size_t n = 0;
  u32 b = 0, chroma;
  int surfaces;
  for (size_t i = 2, zeros = 0; i < size && n < sizeof plain; i++) {
    if (zeros >= 2 && unit[i] == 3) { zeros = 0; continue; }
    zeros = unit[i] ? 0 : zeros + 1;
    plain[n++] = unit[i];
  }
  b = 8 + 96;
  golomb(plain, &b);
  chroma = golomb(plain, &b);
  if (chroma == 3) bit(plain, &b);
  p->width = golomb(plain, &b);
  p->height = golomb(plain, &b);
  /* CUVIDEOFORMAT: codec 0, rate 4, progressive 12, depths 13 and 14, surfaces 15,
   * coded size 16, area 24 (4 ints), chroma 40 */
  set32(format, 0, 8);
  set32(format, 4, 25);
  set32(format, 8, 1);
  format[12] = 1;
  format[15] = 5;
  set32(format, 16, p->width);
  set32(format, 20, p->height);
  set32(format, 32, p->width);
  set32(format, 36, p->height);
  set32(format, 40, chroma);
  surfaces = p->sequence(p->user, format);
  if (surfaces > 1) p->surfaces = (u32)surfaces;
  return surfaces > 0;
}

static int take_unit(struct parser *p, const u8 *unit, size_t size) {
  u32 kind = unit[0] >> 1;
  if (kind == 33) return finish_picture(p) && read_sequence(p, unit, size);
  if (kind > 20) return 1;
  if (unit[2] & 0x80 && !finish_picture(p)) return 0;
  p->picture = realloc(p->picture, p->size + size + 3);
  memcpy(p->picture + p->size, "\0\0\1", 3);
  memcpy(p->picture + p->size + 3, unit, size);
  p->size += size + 3;
  return 1;
}

/* CUVIDSOURCEDATAPACKET: flags 0, size 8, payload 16, stamp 24 */
EXPORT int cuvidParseVideoData(void *handle, const void *packet) {
  struct parser *p = handle;
  u64 flags = at(packet, 0), size = at(packet, 8);
  const u8 *data = (const u8 *)(uintptr_t)at(packet, 16), *start = NULL;
  if (flags & 2) p->stamp = (int64_t)at(packet, 24);
  for (u64 i = 0; data && i + 2 < size; i++)
    if (!data[i] && !data[i + 1] && data[i + 2] == 1) {
      u64 end = i && !data[i - 1] ? i - 1 : i;
      if (start && !take_unit(p, start, (size_t)(data + end - start))) return UNKNOWN;
      start = data + i + 3;
      i += 2;
    }
  if (start && !take_unit(p, start, (size_t)(data + size - start))) return UNKNOWN;
  if (flags & 9 && !finish_picture(p)) return UNKNOWN;
  if (flags & 1) {
    while (p->holds) if (!display_first(p)) return UNKNOWN;
  }
  return OK;
}
#define REFUSED(name) EXPORT int name(void) { return UNSUPPORTED; }
REFUSED(cuvidCreateVideoSource) REFUSED(cuvidCreateVideoSourceW) REFUSED(cuvidDestroyVideoSource)
REFUSED(cuvidSetVideoSourceState) REFUSED(cuvidGetVideoSourceState)
REFUSED(cuvidGetSourceVideoFormat) REFUSED(cuvidGetSourceAudioFormat)
#endif

#ifdef FAKE_ENCODE
/* ---- libnvidia-encode: there, but without an encoder, as on A100, H100 and H200 -------------- */
EXPORT int NvEncodeAPIGetMaxSupportedVersion(u32 *v) { *v = 13 << 4; return 0; }
EXPORT int NvEncodeAPICreateInstance(void *list) { (void)list; return 1; }
#endif
