/* The calls of CUDA's driver for memory between processes, over POSIX shared memory. A thread without a context, a copy
   beyond a shared allocation, and a handle whose memory is freed are errors; copies wait for a synchronisation, as on a
   GPU, and memory whose copies wait cannot be closed. */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef unsigned long long address;
typedef struct { char name[56]; size_t size; } handle; /* 64 bytes, as CUipcMemHandle */
typedef struct { handle shown; address at; int imported; } region;
typedef struct { address to, from; size_t size; } copy;
enum { OK = 0, INVALID = 1, NO_DEVICE = 101, NO_CONTEXT = 201, BAD_HANDLE = 400 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static region regions[256];
static copy waiting[4096];
static int copies, made;
static __thread void *context;

static region *find(address at) {
  for (int i = 0; i < 256; i++)
    if (regions[i].at && at >= regions[i].at && at < regions[i].at + regions[i].shown.size) return &regions[i];
  return NULL;
}

static int map(const handle *shown, int flags, int imported, address *out) {
  int file = shm_open(shown->name, flags, 0600), i = 0;
  if (file < 0) return BAD_HANDLE;
  if (!imported && ftruncate(file, shown->size)) return INVALID;
  while (regions[i].at) i++;
  void *at = mmap(NULL, shown->size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  regions[i] = (region){*shown, (address)at, imported};
  *out = (address)at;
  return OK;
}

int fake_regions(int imported) { /* that are there now */
  int count = 0;
  for (int i = 0; i < 256; i++) count += regions[i].at && regions[i].imported == imported;
  return count;
}

int cuInit(unsigned flags) { return flags; }
int cuDeviceGet(int *out, int number) { *out = 40 + number; return number < 2 ? OK : NO_DEVICE; }
int cuDeviceGetUuid_v2(char *out, int device) { memset(out, device, 16); return OK; }
int cuDevicePrimaryCtxRetain(void **out, int device) { *out = (void *)(size_t)device; return OK; }
int cuCtxSetCurrent(void *given) { context = given; return OK; }
int cuGetErrorString(int error, const char **out) {
  *out = error == BAD_HANDLE ? "invalid resource handle" : error == NO_DEVICE ? "invalid device ordinal" : "invalid argument";
  return OK;
}

int cuMemAlloc_v2(address *out, size_t size) {
  handle shown = {.size = size};
  if (!context) return NO_CONTEXT;
  pthread_mutex_lock(&lock);
  snprintf(shown.name, sizeof shown.name, "/jppo-fake-cuda-%d-%d", getpid(), made++);
  int error = map(&shown, O_CREAT | O_EXCL | O_RDWR, 0, out);
  pthread_mutex_unlock(&lock);
  return error;
}

static int drop(address at, int imported) {
  if (!context) return NO_CONTEXT;
  pthread_mutex_lock(&lock);
  region *there = find(at);
  int error = there && there->at == at && there->imported == imported ? OK : INVALID;
  for (int i = 0; i < copies && !error; i++)
    if (find(waiting[i].to) == there || find(waiting[i].from) == there) error = INVALID;
  if (!error) {
    if (!imported) shm_unlink(there->shown.name);
    munmap((void *)at, there->shown.size);
    there->at = 0;
  }
  pthread_mutex_unlock(&lock);
  return error;
}
int cuMemFree_v2(address at) { return drop(at, 0); }
int cuIpcCloseMemHandle(address at) { return drop(at, 1); }

int cuIpcGetMemHandle(handle *out, address at) {
  region *there = find(at);
  if (!context || !there) return context ? INVALID : NO_CONTEXT;
  *out = there->shown;
  return OK;
}

int cuIpcOpenMemHandle_v2(address *out, handle given, unsigned flags) {
  if (!context || flags != 1) return context ? INVALID : NO_CONTEXT;
  pthread_mutex_lock(&lock);
  int error = map(&given, O_RDWR, 1, out);
  pthread_mutex_unlock(&lock);
  return error;
}

static int beyond(address at, size_t size) {
  region *there = find(at);
  return there && at + size > there->at + there->shown.size;
}

int cuMemcpyDtoD_v2(address to, address from, size_t size) {
  if (!context) return NO_CONTEXT;
  pthread_mutex_lock(&lock);
  int error = beyond(to, size) || beyond(from, size) || copies == 4096 ? INVALID : OK;
  if (!error) waiting[copies++] = (copy){to, from, size};
  pthread_mutex_unlock(&lock);
  return error;
}

int cuStreamSynchronize(void *stream) {
  if (!context || stream) return context ? INVALID : NO_CONTEXT;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < copies; i++) memcpy((void *)waiting[i].to, (void *)waiting[i].from, waiting[i].size);
  copies = 0;
  pthread_mutex_unlock(&lock);
  return OK;
}
