/* NCCL and the CUDA runtime for threads of one process: every collective waits for all ranks of its communicator, compares
   their arguments, and copies the root's host memory. A rank that calls another collective, or none, is an error here,
   where the real library would hang or send garbage. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct { char internal[128]; } ncclUniqueId;
typedef struct { int kind, type, rest; size_t count; } call;
typedef struct group {
  ncclUniqueId id;
  int ranks, joined, arrived, left, bad, aborted;
  unsigned char taken[64];
  call now;
  const void *root_data;
  float sum;
  struct group *next;
} group;
typedef struct comm { group *of; int rank; } comm;
enum { OK = 0, INTERNAL = 3, INVALID = 4, USAGE = 5, REMOTE = 6 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static group *groups;
static __thread int device = -1;
int seconds = 10; /* that a rank waits for others; on a busy machine they are seconds late */

int cudaSetDevice(int d) { device = d; return 0; }
int cudaStreamSynchronize(void *stream) { return stream != NULL; }
const char *ncclGetErrorString(int e) { return e == USAGE ? "the ranks' calls differ" : e == REMOTE ? "a rank is missing" : "invalid"; }

static int wait_until(int *value, int least, group *g) {
  struct timespec end;
  clock_gettime(CLOCK_REALTIME, &end);
  end.tv_sec += seconds;
  while (*value < least && !g->aborted)
    if (pthread_cond_timedwait(&changed, &lock, &end)) return REMOTE;
  return g->aborted ? REMOTE : OK;
}

int ncclGetUniqueId(ncclUniqueId *id) {
  static int made;
  for (int i = 0; i < 128; i++) id->internal[i] = (char)(i * 37 + 200 + made);
  made++;
  return OK;
}

int ncclCommInitRank(comm **out, int ranks, ncclUniqueId id, int rank) {
  int error = OK;
  if ((rank == 0 && device < 0) || rank < 0 || rank >= ranks || ranks > 64) return INVALID;
  pthread_mutex_lock(&lock);
  group *g = groups;
  while (g && memcmp(&g->id, &id, sizeof id)) g = g->next;
  if (!g) {
    g = calloc(1, sizeof *g);
    g->id = id, g->ranks = ranks, g->next = groups, groups = g;
  }
  if (g->ranks != ranks || g->taken[rank]) g->bad = 1;
  g->taken[rank] = 1, g->joined++;
  pthread_cond_broadcast(&changed);
  error = wait_until(&g->joined, g->ranks, g);
  if (g->bad) error = USAGE;
  *out = malloc(sizeof **out);
  (*out)->of = g, (*out)->rank = rank;
  pthread_mutex_unlock(&lock);
  return error;
}

static int collective(comm *c, call mine, const void *send, void *receive, size_t bytes) {
  if (!c || (c->rank == 0 && device < 0)) return INVALID; /* torch sets the workers' devices */
  group *g = c->of;
  pthread_mutex_lock(&lock);
  int error;
  if (!g->arrived) g->now = mine, g->bad = 0, g->sum = 0;
  if (memcmp(&g->now, &mine, sizeof mine)) g->bad = 1;
  if (mine.kind == 1) g->sum += *(const float *)send;
  if (mine.kind == 2 && c->rank == mine.rest) g->root_data = send;
  g->arrived++;
  pthread_cond_broadcast(&changed);
  error = wait_until(&g->arrived, g->ranks, g);
  if (!error && g->bad) error = USAGE;
  if (!error && mine.kind == 1) *(float *)receive = g->sum;
  if (!error && mine.kind == 2 && receive != g->root_data) memcpy(receive, g->root_data, bytes);
  if (error) g->aborted = 1;
  if (++g->left == g->ranks) g->left = g->arrived = 0;
  pthread_cond_broadcast(&changed);
  while (g->left && !g->aborted) pthread_cond_wait(&changed, &lock);
  pthread_mutex_unlock(&lock);
  return error;
}

int ncclAllReduce(const void *send, void *receive, size_t count, int type, int op, comm *c, void *stream) {
  call mine;
  memset(&mine, 0, sizeof mine);
  mine.kind = 1, mine.type = type, mine.rest = op, mine.count = count;
  return type == 7 && count == 1 && op == 0 && !stream ? collective(c, mine, send, receive, 4) : INVALID;
}

int ncclBroadcast(const void *send, void *receive, size_t count, int type, int root, comm *c, void *stream) {
  call mine;
  memset(&mine, 0, sizeof mine);
  mine.kind = 2, mine.type = type, mine.rest = root, mine.count = count;
  return type == 1 && !stream ? collective(c, mine, send, receive, count) : INVALID;
}

int ncclCommAbort(comm *c) {
  pthread_mutex_lock(&lock);
  c->of->aborted = 1;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  return OK;
}
int ncclCommDestroy(comm *c) { return ncclCommAbort(c); }
int ncclGetVersion(int *version) { *version = 23203; return OK; }

/* vLLM's wrapper looks these up and calls none of them here */
#define UNUSED(name) int name(void) { return INTERNAL; }
UNUSED(ncclReduce) UNUSED(ncclAllGather) UNUSED(ncclReduceScatter) UNUSED(ncclSend) UNUSED(ncclRecv)
UNUSED(ncclCommSuspend) UNUSED(ncclCommResume) UNUSED(ncclGroupStart) UNUSED(ncclGroupEnd)
UNUSED(ncclCommWindowRegister) UNUSED(ncclCommWindowDeregister)
