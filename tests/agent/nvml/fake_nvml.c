/* A fake libnvidia-ml.so.1, so that the agent's NVML code runs where there is no GPU.
 *
 * Written from the public NVML ABI; it holds no NVIDIA code.  NVIDIA's own tools accept it too.
 *
 * FAKE_NVML_CONF names an INI file ([node], [gpu *] defaults, [gpu N]).  It is read again whenever
 * its mtime, size or inode changes, so that a test can injure a running node:
 *   err.<function> = <code>      in [node] or [gpu N]: that function fails with the code
 *   delay_ms.<function> = <ms>   in [node]: it is slow, as with a hung GSP
 *   lost = 1                     in [gpu N]: every call on it answers "GPU is lost"
 *   handle_err = <code>          in [gpu N]: no handle can be had
 *   init_err = <code>            in [node]: nvmlInit fails
 * FAKE_NVML_EVENTS names a text file to which a test appends "<uuid> <xid> [gi ci]" lines.
 * A linker version script hides functions that an old driver does not have.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <ctype.h>
#include <unistd.h>
#include <pthread.h>
#include <sys/stat.h>
#include <time.h>

typedef int ret_t;
typedef unsigned int u32;
typedef unsigned long long u64;

enum {
    OK = 0,
    UNINIT = 1,
    EINVAL_ = 2,
    NOTSUP = 3,
    NOTFOUND = 6,
    SMALL = 7,
    NODRV = 9,
    TIMEOUT = 10,
    LOST = 15,
    VERMIS = 25
};

#define API __attribute__((visibility("default"))) ret_t
#define MAXG 32
#define MAXM 8

typedef struct kv {
    char *k, *v;
    struct kv *n;
} kv;

typedef struct dev {
    u32 magic;
    int gpu, mig;
} dev; /* a handle points here; address is stable */

typedef struct gi {
    u32 magic;
    int gpu, mig;
} gi;

static dev handles[MAXG][MAXM + 1];
static gi gpu_instances[MAXG][MAXM], compute_instances[MAXG][MAXM];
static kv *node, *defaults, *gpus[MAXG];
static int count, init_count;
static struct stat last;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static char *trim(char *s) {
    while (isspace((unsigned char)*s))
        s++;
    char *e = s + strlen(s);
    while (e > s && isspace((unsigned char)e[-1]))
        *--e = 0;
    return s;
}

static void put(kv **l, const char *k, const char *v) {
    kv *n = malloc(sizeof *n);
    n->k = strdup(k);
    n->v = strdup(v);
    n->n = *l;
    *l = n;
}

static void drop(kv **l) {
    while (*l) {
        kv *n = (*l)->n;
        free((*l)->k);
        free((*l)->v);
        free(*l);
        *l = n;
    }
}

static const char *find(kv *l, const char *k) {
    for (; l; l = l->n)
        if (!strcmp(l->k, k))
            return l->v;
    return NULL;
}

static void load(void) { /* called with lock held */
    const char *p = getenv("FAKE_NVML_CONF");
    struct stat st;
    if (!p || stat(p, &st))
        return;
    if (st.st_mtim.tv_sec == last.st_mtim.tv_sec && st.st_mtim.tv_nsec == last.st_mtim.tv_nsec &&
        st.st_size == last.st_size && st.st_ino == last.st_ino)
        return;
    FILE *f = fopen(p, "r");
    if (!f)
        return;
    last = st;
    drop(&node);
    drop(&defaults);
    for (int i = 0; i < MAXG; i++)
        drop(&gpus[i]);
    count = 0;
    kv **cur = &node;
    char line[4096];
    while (fgets(line, sizeof line, f)) {
        char *s = trim(line);
        if (!*s || *s == '#' || *s == ';')
            continue;
        if (*s == '[') {
            int i;
            if (!strncmp(s, "[node]", 6))
                cur = &node;
            else if (!strncmp(s, "[gpu *]", 7))
                cur = &defaults;
            else if (sscanf(s, "[gpu %d]", &i) == 1 && i >= 0 && i < MAXG) {
                cur = &gpus[i];
                if (i >= count)
                    count = i + 1;
                put(cur, "_", "1");
            }
            continue;
        }
        char *e = strchr(s, '=');
        if (!e)
            continue;
        *e = 0;
        put(cur, trim(s), trim(e + 1));
    }
    fclose(f);
    for (int i = 0; i < MAXG; i++) {
        for (int m = 0; m <= MAXM; m++) {
            handles[i][m].magic = 0x564e4d4c;
            handles[i][m].gpu = i;
            handles[i][m].mig = m - 1;
        }
        for (int m = 0; m < MAXM; m++) {
            gpu_instances[i][m] = (gi){0x47490000, i, m};
            compute_instances[i][m] = (gi){0x43490000, i, m};
        }
    }
}

static const char *gpu_text(int g, const char *k, const char *d) {
    const char *v = find(gpus[g], k);
    if (!v)
        v = find(defaults, k);
    return v ? v : d;
}

static u64 gpu_number(int g, const char *k, u64 d) {
    const char *v = gpu_text(g, k, NULL);
    return v ? strtoull(v, NULL, 0) : d;
}

static const char *node_text(const char *k, const char *d) {
    const char *v = find(node, k);
    return v ? v : d;
}

/* a MIG device: mig.<n> = UUID,gi,ci,profileName,slices,memMiB,giProfileId,giProfileIndex,start,size[,ciSlices];
 * start and size are in memory slices, and a compute instance has all of its GPU instance's slices if not told */
static void find_mig_place(int g, int m, u32 *start, u32 *size, u32 *ci_slices) {
    char k[16];
    snprintf(k, sizeof k, "mig.%d", m);
    u32 slices = 0, ci = 0;
    *start = *size = 0;
    int found = sscanf(gpu_text(g, k, ""), "%*[^,],%*u,%*u,%*[^,],%u,%*u,%*u,%*u,%u,%u,%u", &slices, start, size, &ci);
    *ci_slices = found == 4 ? ci : slices;
}

static int find_mig(int g, int m, char *uuid, u32 *gi_, u32 *ci, char *prof, u32 *sl, u32 *mem, u32 *pid,
                    u32 *pidx) {
    char k[16];
    snprintf(k, sizeof k, "mig.%d", m);
    const char *v = gpu_text(g, k, NULL);
    if (!v)
        return 0;
    u32 a = 0, b = 0, s = 0, mm = 0, p = 0, x = 0;
    char u[96] = "", pr[96] = "";
    if (sscanf(v, "%95[^,],%u,%u,%95[^,],%u,%u,%u,%u", u, &a, &b, pr, &s, &mm, &p, &x) < 4)
        return 0;
    if (uuid)
        strcpy(uuid, u);
    if (prof)
        strcpy(prof, pr);
    if (gi_)
        *gi_ = a;
    if (ci)
        *ci = b;
    if (sl)
        *sl = s;
    if (mem)
        *mem = mm;
    if (pid)
        *pid = p;
    if (pidx)
        *pidx = x;
    return 1;
}

static ret_t enter(const char *fn, void *h, int need) { /* locks; caller unlocks via LEAVE */
    pthread_mutex_lock(&lock);
    load();
    {
        char k[128];
        snprintf(k, sizeof k, "delay_ms.%s", fn);
        const char *v = node_text(k, NULL);
        if (v) {
            long ms = atol(v);
            pthread_mutex_unlock(&lock);
            struct timespec t = {ms / 1000, (ms % 1000) * 1000000L};
            nanosleep(&t, NULL);
            pthread_mutex_lock(&lock);
        }
    }
    if (need && init_count <= 0)
        return UNINIT;
    char k[128];
    snprintf(k, sizeof k, "err.%s", fn);
    const char *v = node_text(k, NULL);
    if (v)
        return atoi(v);
    if (h) {
        dev *d = h;
        if (d->magic != 0x564e4d4c || d->gpu >= count)
            return EINVAL_;
        v = gpu_text(d->gpu, k, NULL);
        if (v)
            return atoi(v);
        if (gpu_number(d->gpu, "lost", 0))
            return LOST;
    }
    return OK;
}

#define LEAVE(r)                                                                                             \
    do {                                                                                                     \
        pthread_mutex_unlock(&lock);                                                                         \
        return (r);                                                                                          \
    } while (0)
#define BEGIN(h)                                                                                             \
    dev *d_ = (dev *)(h);                                                                                    \
    int g = d_ ? d_->gpu : 0;                                                                                \
    (void)g;                                                                                                 \
    ret_t r_ = enter(__func__, (h), 1);                                                                      \
    if (r_)                                                                                                  \
    LEAVE(r_)

static ret_t copy_text(char *o, u32 n, const char *v) {
    if (!v)
        return NOTSUP;
    if (strlen(v) + 1 > n)
        return SMALL;
    strcpy(o, v);
    return OK;
}

#define OPT_U(key, out)                                                                                      \
    do {                                                                                                     \
        const char *v = gpu_text(g, key, NULL);                                                              \
        if (!v)                                                                                              \
            LEAVE(NOTSUP);                                                                                   \
        *(out) = strtoull(v, NULL, 0);                                                                       \
        LEAVE(OK);                                                                                           \
    } while (0)

static ret_t init(const char *fn) {
    ret_t r = enter(fn, NULL, 0);
    if (!r) {
        const char *v = node_text("init_err", NULL);
        if (v && atoi(v))
            r = atoi(v);
        else if (!getenv("FAKE_NVML_CONF"))
            r = NODRV;
        else
            init_count++;
    }
    LEAVE(r);
}

API nvmlInit_v2(void) {
    return init("nvmlInit_v2");
}

API nvmlInit(void) {
    return init("nvmlInit");
}

API nvmlInitWithFlags(u32 f) {
    (void)f;
    return init("nvmlInitWithFlags");
}

API nvmlShutdown(void) {
    pthread_mutex_lock(&lock);
    ret_t r = init_count > 0 ? OK : UNINIT;
    if (init_count > 0)
        init_count--;
    LEAVE(r);
}

__attribute__((visibility("default"))) const char *nvmlErrorString(ret_t r) {
    switch (r) {
    case 0:
        return "Success";
    case 1:
        return "Uninitialized";
    case 2:
        return "Invalid Argument";
    case 3:
        return "Not Supported";
    case 4:
        return "Insufficient Permissions";
    case 6:
        return "Not Found";
    case 7:
        return "Insufficient Size";
    case 9:
        return "Driver Not Loaded";
    case 10:
        return "Timeout";
    case 12:
        return "NVML Shared Library Not Found";
    case 13:
        return "Function Not Found";
    case 15:
        return "GPU is lost";
    case 16:
        return "GPU requires reset";
    case 18:
        return "Driver/library version mismatch";
    case 19:
        return "In use by another client";
    case 25:
        return "Argument version mismatch";
    case 27:
        return "Not ready";
    default:
        return "Unknown Error";
    }
}

API nvmlSystemGetDriverVersion(char *o, u32 n) {
    BEGIN(NULL);
    LEAVE(copy_text(o, n, node_text("driver", "550.163.01")));
}

API nvmlSystemGetNVMLVersion(char *o, u32 n) {
    BEGIN(NULL);
    LEAVE(copy_text(o, n, node_text("nvml", "12.550.163.01")));
}

API nvmlSystemGetCudaDriverVersion(int *o) {
    BEGIN(NULL);
    *o = atoi(node_text("cuda", "12040"));
    LEAVE(OK);
}

API nvmlSystemGetCudaDriverVersion_v2(int *o) {
    BEGIN(NULL);
    *o = atoi(node_text("cuda", "12040"));
    LEAVE(OK);
}

API nvmlSystemGetProcessName(u32 pid, char *o, u32 n) {
    BEGIN(NULL);
    char p[64];
    snprintf(p, sizeof p, "/proc/%u/comm", pid);
    FILE *f = fopen(p, "r");
    char b[256] = "";
    if (!f)
        LEAVE(NOTFOUND);
    if (!fgets(b, sizeof b, f))
        b[0] = 0;
    fclose(f);
    LEAVE(copy_text(o, n, trim(b)));
}

API nvmlDeviceGetCount_v2(u32 *o) {
    BEGIN(NULL);
    *o = count;
    LEAVE(OK);
}

API nvmlDeviceGetCount(u32 *o) {
    BEGIN(NULL);
    *o = count;
    LEAVE(OK);
}

static ret_t handle_of(u32 i, void **o) {
    if ((int)i >= count)
        return EINVAL_;
    if (gpu_number(i, "lost", 0))
        return LOST;
    u64 e = gpu_number(i, "handle_err", 0);
    if (e)
        return e;
    *o = &handles[i][0];
    return OK;
}

API nvmlDeviceGetHandleByIndex_v2(u32 i, void **o) {
    BEGIN(NULL);
    LEAVE(handle_of(i, o));
}

API nvmlDeviceGetHandleByIndex(u32 i, void **o) {
    BEGIN(NULL);
    LEAVE(handle_of(i, o));
}

API nvmlDeviceGetHandleByUUID(const char *u, void **o) {
    BEGIN(NULL);
    for (int i = 0; i < count; i++) {
        if (!strcmp(gpu_text(i, "uuid", ""), u))
            LEAVE(handle_of(i, o));
        for (int m = 0; m < MAXM; m++) {
            char x[96];
            if (find_mig(i, m, x, 0, 0, 0, 0, 0, 0, 0) && !strcmp(x, u)) {
                *o = &handles[i][m + 1];
                LEAVE(OK);
            }
        }
    }
    LEAVE(NOTFOUND);
}

API nvmlDeviceGetHandleByPciBusId_v2(const char *b, void **o) {
    BEGIN(NULL);
    for (int i = 0; i < count; i++)
        if (!strcasecmp(gpu_text(i, "pci", ""), b) ||
            (strlen(b) == 16 && !strncmp(b, "0000", 4) && !strcasecmp(gpu_text(i, "pci", ""), b + 4)))
            LEAVE(handle_of(i, o));
    LEAVE(NOTFOUND);
}

API nvmlDeviceGetIndex(void *h, u32 *o) {
    BEGIN(h);
    *o = d_->mig < 0 ? g : d_->mig;
    LEAVE(OK);
}

API nvmlDeviceGetName(void *h, char *o, u32 n) {
    BEGIN(h);
    if (d_->mig >= 0) {
        char p[96], b[256];
        find_mig(g, d_->mig, 0, 0, 0, p, 0, 0, 0, 0);
        snprintf(b, sizeof b, "%s MIG %s", gpu_text(g, "name", "?"), p);
        LEAVE(copy_text(o, n, b));
    }
    LEAVE(copy_text(o, n, gpu_text(g, "name", NULL)));
}

API nvmlDeviceGetUUID(void *h, char *o, u32 n) {
    BEGIN(h);
    if (d_->mig >= 0) {
        char u[96];
        if (!find_mig(g, d_->mig, u, 0, 0, 0, 0, 0, 0, 0))
            LEAVE(NOTFOUND);
        LEAVE(copy_text(o, n, u));
    }
    LEAVE(copy_text(o, n, gpu_text(g, "uuid", NULL)));
}

API nvmlDeviceGetSerial(void *h, char *o, u32 n) {
    BEGIN(h);
    LEAVE(copy_text(o, n, gpu_text(g, "serial", NULL)));
}

API nvmlDeviceGetBoardPartNumber(void *h, char *o, u32 n) {
    BEGIN(h);
    LEAVE(copy_text(o, n, gpu_text(g, "part", NULL)));
}

API nvmlDeviceGetVbiosVersion(void *h, char *o, u32 n) {
    BEGIN(h);
    LEAVE(copy_text(o, n, gpu_text(g, "vbios", NULL)));
}

API nvmlDeviceGetMinorNumber(void *h, u32 *o) {
    BEGIN(h);
    if (d_->mig >= 0)
        LEAVE(EINVAL_);
    *o = gpu_number(g, "minor", g);
    LEAVE(OK);
}

API nvmlDeviceGetModuleId(void *h, u32 *o) {
    BEGIN(h);
    OPT_U("module", o);
}

API nvmlDeviceGetBrand(void *h, u32 *o) {
    BEGIN(h);
    *o = gpu_number(g, "brand", 14);
    LEAVE(OK);
}

API nvmlDeviceGetArchitecture(void *h, u32 *o) {
    BEGIN(h);
    *o = gpu_number(g, "arch", 9);
    LEAVE(OK);
}

API nvmlDeviceGetCudaComputeCapability(void *h, int *a, int *b) {
    BEGIN(h);
    if (sscanf(gpu_text(g, "cc", "9.0"), "%d.%d", a, b) != 2)
        LEAVE(NOTSUP);
    LEAVE(OK);
}

API nvmlDeviceGetNumaNodeId(void *h, u32 *o) {
    BEGIN(h);
    OPT_U("numa", o);
}

typedef struct {
    char legacy[16];
    u32 domain, bus, device, id, sub;
    char bus_id[32];
} pci_t;

static ret_t fill_pci(const char *b, u32 id, u32 sub, pci_t *p) {
    u32 D_, B, V;
    if (!b || sscanf(b, "%x:%x:%x", &D_, &B, &V) != 3)
        return NOTSUP;
    memset(p, 0, sizeof *p);
    p->domain = D_;
    p->bus = B;
    p->device = V;
    p->id = id;
    p->sub = sub;
    snprintf(p->legacy, 16, "%04X:%02X:%02X.0", D_ & 0xffff, B & 0xff, V & 0xff);
    snprintf(p->bus_id, 32, "%08X:%02X:%02X.0", D_, B, V);
    return OK;
}

API nvmlDeviceGetPciInfo_v3(void *h, pci_t *p) {
    BEGIN(h);
    LEAVE(fill_pci(gpu_text(g, "pci", NULL), gpu_number(g, "pci_device_id", 0x233010DE),
                   gpu_number(g, "pci_subsys", 0x16C110DE), p));
}

API nvmlDeviceGetPciInfo_v2(void *h, pci_t *p) {
    BEGIN(h);
    LEAVE(fill_pci(gpu_text(g, "pci", NULL), gpu_number(g, "pci_device_id", 0x233010DE),
                   gpu_number(g, "pci_subsys", 0x16C110DE), p));
}

API nvmlDeviceGetCurrPcieLinkGeneration(void *h, u32 *o) {
    BEGIN(h);
    OPT_U("pcie_gen", o);
}

API nvmlDeviceGetMaxPcieLinkGeneration(void *h, u32 *o) {
    BEGIN(h);
    OPT_U("pcie_gen_max", o);
}

API nvmlDeviceGetCurrPcieLinkWidth(void *h, u32 *o) {
    BEGIN(h);
    OPT_U("pcie_width", o);
}

API nvmlDeviceGetMaxPcieLinkWidth(void *h, u32 *o) {
    BEGIN(h);
    OPT_U("pcie_width_max", o);
}

API nvmlDeviceGetPcieReplayCounter(void *h, u32 *o) {
    BEGIN(h);
    OPT_U("pcie_replay", o);
}

static u64 gpu_mib(dev *d_, const char *k, u64 df) {
    int g = d_->gpu;
    if (d_->mig >= 0 && !strcmp(k, "mem_total_mib")) {
        u32 m = 0;
        find_mig(g, d_->mig, 0, 0, 0, 0, 0, &m, 0, 0);
        return m;
    }
    return gpu_number(g, k, df);
}

API nvmlDeviceGetMemoryInfo(void *h, u64 *m) {
    BEGIN(h);
    u64 t = gpu_mib(d_, "mem_total_mib", 81559),
        u = gpu_mib(d_, "mem_used_mib", 0) + gpu_mib(d_, "mem_reserved_mib", 0);
    m[0] = t << 20;
    m[1] = (t - u) << 20;
    m[2] = u << 20;
    LEAVE(OK);
}

API nvmlDeviceGetMemoryInfo_v2(
    void *h, struct {
        u32 v;
        u64 t, r, f, u;
    } * m) {
    BEGIN(h);
    if (m->v != 0x02000028)
        LEAVE(VERMIS);
    u64 t = gpu_mib(d_, "mem_total_mib", 81559), u = gpu_mib(d_, "mem_used_mib", 0),
        rs = gpu_mib(d_, "mem_reserved_mib", 0);
    m->t = t << 20;
    m->r = rs << 20;
    m->u = u << 20;
    m->f = (t - u - rs) << 20;
    LEAVE(OK);
}

API nvmlDeviceGetTemperature(void *h, u32 s, u32 *o) {
    BEGIN(h);
    if (s)
        LEAVE(EINVAL_);
    OPT_U("temp", o);
}

API nvmlDeviceGetTemperatureV(
    void *h, struct {
        u32 v;
        u32 s;
        int t;
    } * p) {
    BEGIN(h);
    if ((p->v >> 24) != 1)
        LEAVE(VERMIS);
    OPT_U("temp", &p->t);
}

API nvmlDeviceGetTemperatureThreshold(void *h, u32 k, u32 *o) {
    BEGIN(h);
    char key[32];
    snprintf(key, sizeof key, "temp_threshold.%u", k);
    OPT_U(key, o);
}

API nvmlDeviceGetPowerUsage(void *h, u32 *o) {
    BEGIN(h);
    OPT_U("power_mw", o);
}

API nvmlDeviceGetEnforcedPowerLimit(void *h, u32 *o) {
    BEGIN(h);
    OPT_U("power_limit_mw", o);
}

API nvmlDeviceGetCurrentClocksThrottleReasons(void *h, u64 *o) {
    BEGIN(h);
    OPT_U("throttle", o);
}

API nvmlDeviceGetCurrentClocksEventReasons(void *h, u64 *o) {
    BEGIN(h);
    OPT_U("throttle", o);
}

API nvmlDeviceGetPersistenceMode(void *h, u32 *o) {
    BEGIN(h);
    OPT_U("persistence", o);
}

API nvmlDeviceGetComputeMode(void *h, u32 *o) {
    BEGIN(h);
    OPT_U("compute_mode", o);
}

API nvmlDeviceGetUtilizationRates(void *h, u32 *o) {
    BEGIN(h);
    const char *v = gpu_text(g, "util", NULL);
    if (!v)
        LEAVE(NOTSUP);
    o[0] = atoi(v);
    o[1] = 0;
    LEAVE(OK);
}

API nvmlDeviceGetEccMode(void *h, u32 *c, u32 *p) {
    BEGIN(h);
    const char *v = gpu_text(g, "ecc", NULL);
    if (!v)
        LEAVE(NOTSUP);
    *c = *p = 0;
    sscanf(v, "%u/%u", c, p);
    LEAVE(OK);
}

API nvmlDeviceGetTotalEccErrors(void *h, u32 type, u32 ctr, u64 *o) {
    BEGIN(h);
    char k[32];
    snprintf(k, sizeof k, "ecc.%s.%s", ctr ? "aggregate" : "volatile", type ? "uncorrected" : "corrected");
    OPT_U(k, o);
}

API nvmlDeviceGetMemoryErrorCounter(void *h, u32 type, u32 ctr, u32 loc, u64 *o) {
    BEGIN(h);
    (void)loc;
    char k[32];
    snprintf(k, sizeof k, "ecc.%s.%s", ctr ? "aggregate" : "volatile", type ? "uncorrected" : "corrected");
    OPT_U(k, o);
}

API nvmlDeviceGetRetiredPages(void *h, u32 cause, u32 *n, u64 *a) {
    BEGIN(h);
    char k[32];
    snprintf(k, sizeof k, "retired.%u", cause);
    const char *v = gpu_text(g, k, NULL);
    if (!v)
        LEAVE(NOTSUP);
    u32 c = atoi(v);
    if (!a || *n < c) {
        *n = c;
        LEAVE(c ? SMALL : OK);
    }
    for (u32 i = 0; i < c; i++)
        a[i] = 0x1000 * (i + 1);
    *n = c;
    LEAVE(OK);
}

API nvmlDeviceGetRetiredPagesPendingStatus(void *h, u32 *o) {
    BEGIN(h);
    OPT_U("retired_pending", o);
}

API nvmlDeviceGetRemappedRows(void *h, u32 *c, u32 *u, u32 *p, u32 *f) {
    BEGIN(h);
    const char *v = gpu_text(g, "remap", NULL);
    if (!v)
        LEAVE(NOTSUP);
    *c = *u = *p = *f = 0;
    sscanf(v, "%u,%u,%u,%u", c, u, p, f);
    LEAVE(OK);
}

API nvmlDeviceGetRowRemapperHistogram(void *h, u32 *o) {
    BEGIN(h);
    const char *v = gpu_text(g, "remap_hist", NULL);
    if (!v)
        LEAVE(NOTSUP);
    memset(o, 0, 20);
    sscanf(v, "%u,%u,%u,%u,%u", o, o + 1, o + 2, o + 3, o + 4);
    LEAVE(OK);
}

/* field values: field.<id> = value */
typedef struct {
    u32 id, scope;
    long long ts, lat;
    u32 vt;
    int ret;

    union {
        double d;
        u32 ui;
        u64 ull;
    } v;
} fv_t;

API nvmlDeviceGetFieldValues(void *h, int n, fv_t *f) {
    BEGIN(h);
    for (int i = 0; i < n; i++) {
        char k[32];
        snprintf(k, sizeof k, "field.%u", f[i].id);
        const char *v = gpu_text(g, k, NULL);
        f[i].ts = time(NULL) * 1000000LL;
        f[i].lat = 0;
        f[i].v.ull = 0;
        f[i].vt = 3;
        f[i].ret = v ? OK : NOTSUP;
        if (v)
            f[i].v.ull = strtoull(v, NULL, 0);
    }
    LEAVE(OK);
}

/* NVLink: nvlinks=<count>; nvlink_down=1,2; nvlink_peer=switch|gpu ; nvlink.<n> = <pci bus id> */
static int link_is_down(int gg, u32 l) {
    char b[256];
    snprintf(b, sizeof b, ",%s,", gpu_text(gg, "nvlink_down", ""));
    char k[16];
    snprintf(k, sizeof k, ",%u,", l);
    return strstr(b, k) != NULL;
}

#define LINK()                                                                                               \
    do {                                                                                                     \
        u64 n_ = gpu_number(g, "nvlinks", 0);                                                                \
        if (!n_)                                                                                             \
            LEAVE(NOTSUP);                                                                                   \
        if (l >= n_)                                                                                         \
            LEAVE(EINVAL_);                                                                                  \
    } while (0)

API nvmlDeviceGetNvLinkState(void *h, u32 l, u32 *o) {
    BEGIN(h);
    LINK();
    *o = !link_is_down(g, l);
    LEAVE(OK);
}

API nvmlDeviceGetNvLinkVersion(void *h, u32 l, u32 *o) {
    BEGIN(h);
    LINK();
    OPT_U("nvlink_version", o);
}

API nvmlDeviceGetNvLinkErrorCounter(void *h, u32 l, u32 c, u64 *o) {
    BEGIN(h);
    LINK();
    char k[32];
    snprintf(k, sizeof k, "nvlink_err.%u.%u", l, c);
    *o = gpu_number(g, k, 0);
    LEAVE(OK);
}

API nvmlDeviceGetNvLinkRemoteDeviceType(void *h, u32 l, u32 *o) {
    BEGIN(h);
    LINK();
    if (link_is_down(g, l))
        LEAVE(NOTSUP);
    *o = !strcmp(gpu_text(g, "nvlink_peer", "switch"), "gpu") ? 0 : 2;
    LEAVE(OK);
}

API nvmlDeviceGetNvLinkRemotePciInfo_v2(void *h, u32 l, pci_t *p) {
    BEGIN(h);
    LINK();
    if (link_is_down(g, l))
        LEAVE(NOTSUP);
    char k[16];
    snprintf(k, sizeof k, "nvlink.%u", l);
    LEAVE(fill_pci(gpu_text(g, k, NULL), 0, 0, p));
}

API nvmlDeviceGetTopologyCommonAncestor(void *h, void *h2, u32 *o) {
    BEGIN(h);
    dev *e = h2;
    if (!e || e->magic != 0x564e4d4c)
        LEAVE(EINVAL_);
    int b = e->gpu;
    if (b == g)
        *o = 0;
    else if (!strcmp(gpu_text(g, "pcie_switch", "a"), gpu_text(b, "pcie_switch", "b")))
        *o = 10;
    else if (gpu_number(g, "numa", 0) == gpu_number(b, "numa", 1))
        *o = 40;
    else
        *o = 50;
    LEAVE(OK);
}

API nvmlDeviceGetP2PStatus(void *h, void *h2, u32 idx, u32 *o) {
    BEGIN(h);
    (void)h2;
    (void)idx;
    *o = gpu_number(g, "p2p", 0);
    LEAVE(OK);
}

/* MIG */
API nvmlDeviceGetMigMode(void *h, u32 *c, u32 *p) {
    BEGIN(h);
    const char *v = gpu_text(g, "mig_mode", NULL);
    if (!v || d_->mig >= 0)
        LEAVE(NOTSUP);
    *c = *p = 0;
    sscanf(v, "%u/%u", c, p);
    LEAVE(OK);
}

API nvmlDeviceIsMigDeviceHandle(void *h, u32 *o) {
    BEGIN(h);
    *o = d_->mig >= 0;
    LEAVE(OK);
}

API nvmlDeviceGetMaxMigDeviceCount(void *h, u32 *o) {
    BEGIN(h);
    u32 c = 0, p;
    const char *v = gpu_text(g, "mig_mode", NULL);
    if (v)
        sscanf(v, "%u/%u", &c, &p);
    *o = v ? 7 : 0;
    LEAVE(OK);
}

API nvmlDeviceGetMigDeviceHandleByIndex(void *h, u32 i, void **o) {
    BEGIN(h);
    if (i >= MAXM)
        LEAVE(EINVAL_);
    if (!find_mig(g, i, 0, 0, 0, 0, 0, 0, 0, 0))
        LEAVE(NOTFOUND);
    *o = &handles[g][i + 1];
    LEAVE(OK);
}

API nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *h, void **o) {
    BEGIN(h);
    if (d_->mig < 0)
        LEAVE(EINVAL_);
    *o = &handles[g][0];
    LEAVE(OK);
}

API nvmlDeviceGetGpuInstanceId(void *h, u32 *o) {
    BEGIN(h);
    if (d_->mig < 0 || !find_mig(g, d_->mig, 0, o, 0, 0, 0, 0, 0, 0))
        LEAVE(NOTSUP);
    LEAVE(OK);
}

API nvmlDeviceGetComputeInstanceId(void *h, u32 *o) {
    BEGIN(h);
    if (d_->mig < 0 || !find_mig(g, d_->mig, 0, 0, o, 0, 0, 0, 0, 0))
        LEAVE(NOTSUP);
    LEAVE(OK);
}

API nvmlDeviceGetAttributes_v2(
    void *h, struct {
        u32 a[8];
        u64 mb;
    } * o) {
    BEGIN(h);
    u32 s = 0, m = 0;
    if (d_->mig < 0 || !find_mig(g, d_->mig, 0, 0, 0, 0, &s, &m, 0, 0))
        LEAVE(NOTSUP);
    memset(o, 0, sizeof *o);
    o->a[0] = 16 * s;
    o->a[1] = 1;
    u32 start, size;
    o->a[6] = s;
    find_mig_place(g, d_->mig, &start, &size, &o->a[7]);
    o->mb = m;
    LEAVE(OK);
}

API nvmlDeviceGetGpuInstanceById(void *h, u32 id, void **o) {
    BEGIN(h);
    for (int m = 0; m < MAXM; m++) {
        u32 a;
        if (find_mig(g, m, 0, &a, 0, 0, 0, 0, 0, 0) && a == id) {
            *o = &gpu_instances[g][m];
            LEAVE(OK);
        }
    }
    LEAVE(NOTFOUND);
}

API nvmlGpuInstanceGetComputeInstanceById(void *x, u32 id, void **o) {
    pthread_mutex_lock(&lock);
    gi *q = x;
    u32 c;
    if (!find_mig(q->gpu, q->mig, 0, 0, &c, 0, 0, 0, 0, 0) || c != id)
        LEAVE(NOTFOUND);
    *o = &compute_instances[q->gpu][q->mig];
    LEAVE(OK);
}

API nvmlGpuInstanceGetInfo(
    void *x, struct {
        void *d;
        u32 id, pid, st, sz;
    } * o) {
    pthread_mutex_lock(&lock);
    gi *q = x;
    u32 ci_slices;
    o->d = &handles[q->gpu][0];
    if (!find_mig(q->gpu, q->mig, 0, &o->id, 0, 0, 0, 0, &o->pid, 0))
        LEAVE(NOTFOUND);
    find_mig_place(q->gpu, q->mig, &o->st, &o->sz, &ci_slices);
    LEAVE(OK);
}

API nvmlComputeInstanceGetInfo_v2(
    void *x, struct {
        void *d, *gi_;
        u32 id, pid, st, sz;
    } * o) {
    pthread_mutex_lock(&lock);
    gi *q = x;
    u32 s = 0;
    o->d = &handles[q->gpu][0];
    o->gi_ = &gpu_instances[q->gpu][q->mig];
    if (!find_mig(q->gpu, q->mig, 0, 0, &o->id, 0, &s, 0, 0, 0))
        LEAVE(NOTFOUND);
    o->pid = s - 1;
    o->st = 0;
    o->sz = s;
    LEAVE(OK);
}

/* gpu_instances profiles: gi_profile.<index> = id,name,slices,count,sms,memMiB */
static int find_profile(int gg, u32 i, u32 *id, char *nm, u32 *sl, u32 *c, u32 *sm, u32 *mem) {
    char k[24];
    snprintf(k, sizeof k, "gi_profile.%u", i);
    const char *v = gpu_text(gg, k, NULL);
    return v && sscanf(v, "%u,%95[^,],%u,%u,%u,%u", id, nm, sl, c, sm, mem) == 6;
}

/* gi_placements.<profile id> = start:size,start:size,... */
API nvmlDeviceGetGpuInstancePossiblePlacements_v2(
    void *h, u32 id, struct {
        u32 st, sz;
    } * o, u32 *n) {
    BEGIN(h);
    char k[32];
    snprintf(k, sizeof k, "gi_placements.%u", id);
    const char *v = gpu_text(g, k, NULL);
    if (!v || d_->mig >= 0)
        LEAVE(NOTSUP);
    u32 room = *n, there = 0, st, sz;
    int used;
    for (; sscanf(v, "%u:%u%n", &st, &sz, &used) == 2; v += used + (v[used] == ',')) {
        if (o && there < room)
            o[there].st = st, o[there].sz = sz;
        there++;
    }
    *n = there;
    LEAVE(o && there > room ? SMALL : OK);
}

API nvmlDeviceGetGpuInstanceProfileInfo(
    void *h, u32 i, struct {
        u32 a[10];
        u64 mb;
    } * o) {
    BEGIN(h);
    u32 id, s, c, sm, m;
    char n[96];
    if (!find_profile(g, i, &id, n, &s, &c, &sm, &m))
        LEAVE(NOTSUP);
    memset(o, 0, sizeof *o);
    o->a[0] = id;
    o->a[2] = s;
    o->a[3] = c;
    o->a[4] = sm;
    o->mb = m;
    LEAVE(OK);
}

API nvmlDeviceGetGpuInstanceProfileInfoV(
    void *h, u32 i, struct {
        u32 v;
        u32 a[10];
        u64 mb;
        char name[96];
    } * o) {
    BEGIN(h);
    u32 ver = o->v >> 24;
    u32 id, s, c, sm, m;
    char n[96];
    if (!find_profile(g, i, &id, n, &s, &c, &sm, &m))
        LEAVE(NOTSUP);
    if (ver == 2) {
        o->a[0] = id;
        o->a[1] = 0;
        o->a[2] = s;
        o->a[3] = c;
        o->a[4] = sm;
        o->mb = m;
        snprintf(o->name, 96, "MIG %s", n);
        LEAVE(OK);
    }
    LEAVE(VERMIS);
}

API nvmlGpuInstanceGetComputeInstanceProfileInfo(void *x, u32 i, u32 e, u32 *o) {
    pthread_mutex_lock(&lock);
    gi *q = x;
    u32 s = 0;
    find_mig(q->gpu, q->mig, 0, 0, 0, 0, &s, 0, 0, 0);
    if (e || i > 7)
        LEAVE(NOTSUP);
    memset(o, 0, 40);
    u32 want = s == 7 ? 4 : s - 1;
    if (i != want)
        LEAVE(NOTSUP);
    o[0] = s - 1;
    o[1] = s;
    o[2] = 1;
    LEAVE(OK);
}

API nvmlDeviceGetGpuInstanceRemainingCapacity(void *h, u32 id, u32 *o) {
    BEGIN(h);
    u32 i_, s, c, sm, m;
    char n[96];
    for (u32 i = 0; i < 32; i++)
        if (find_profile(g, i, &i_, n, &s, &c, &sm, &m) && i_ == id) {
            u32 used = 0;
            for (int k = 0; k < MAXM; k++) {
                u32 p;
                if (find_mig(g, k, 0, 0, 0, 0, 0, 0, &p, 0) && p == id)
                    used++;
            }
            *o = c > used ? c - used : 0;
            LEAVE(OK);
        }
    LEAVE(NOTSUP);
}

/* fabric */
API nvmlDeviceGetGpuFabricInfoV(
    void *h, struct {
        u32 v;
        unsigned char cu[16];
        int status;
        u32 clique;
        unsigned char state;
        u32 mask;
        unsigned char sum;
    } * o) {
    BEGIN(h);
    if (o->v != 0x02000024 && o->v != 0x03000028)
        LEAVE(VERMIS);
    const char *v = gpu_text(g, "fabric", NULL);
    if (!v)
        LEAVE(NOTSUP);
    u32 st = 0, cl = 0, ms = 0;
    int rs = 0;
    sscanf(v, "%u,%d,%u,%x", &st, &rs, &cl, &ms);
    memset(o->cu, 0, 16);
    const char *u = gpu_text(g, "fabric_cluster", "");
    int n = 0;
    for (; *u && n < 32; u++)
        if (isxdigit((unsigned char)*u)) {
            int x = isdigit((unsigned char)*u) ? *u - '0' : tolower(*u) - 'a' + 10;
            o->cu[n / 2] = (o->cu[n / 2] << 4) | x;
            n++;
        }
    o->state = st;
    o->status = rs;
    o->clique = cl;
    o->mask = ms;
    if (o->v == 0x03000028)
        o->sum = gpu_number(g, "fabric_health", 1);
    LEAVE(OK);
}

/* processes: procs = pid:MiB,pid:MiB */
API nvmlDeviceGetComputeRunningProcesses_v3(
    void *h, u32 *n, struct {
        u32 pid;
        u64 mem;
        u32 gi_, ci;
    } * o) {
    BEGIN(h);
    const char *v = gpu_text(g, "procs", "");
    u32 c = 0;
    for (const char *p = v; *p;) {
        c++;
        p = strchr(p, ',');
        if (!p)
            break;
        p++;
    }
    if (!*v)
        c = 0;
    if (!o || *n < c) {
        *n = c;
        LEAVE(c ? SMALL : OK);
    }
    u32 i = 0;
    for (const char *p = v; *p && i < c; i++) {
        u32 a, b;
        if (sscanf(p, "%u:%u", &a, &b) != 2)
            break;
        o[i].pid = a;
        o[i].mem = (u64)b << 20;
        o[i].gi_ = o[i].ci = 0xffffffff;
        p = strchr(p, ',');
        if (!p) {
            i++;
            break;
        }
        p++;
    }
    *n = i;
    LEAVE(OK);
}

/* events */
typedef struct {
    long off;
    u64 mask[MAXG];
} set_t;

API nvmlEventSetCreate(void **o) {
    BEGIN(NULL);
    set_t *s = calloc(1, sizeof *s);
    const char *p = getenv("FAKE_NVML_EVENTS");
    struct stat st;
    if (p && !stat(p, &st))
        s->off = st.st_size;
    *o = s;
    LEAVE(OK);
}

API nvmlEventSetFree(void *s) {
    free(s);
    return OK;
}

API nvmlDeviceGetSupportedEventTypes(void *h, u64 *o) {
    BEGIN(h);
    *o = gpu_number(g, "events", 0x1f);
    LEAVE(OK);
}

API nvmlDeviceRegisterEvents(void *h, u64 m, void *s) {
    BEGIN(h);
    if (m & ~gpu_number(g, "events", 0x1f))
        LEAVE(NOTSUP);
    ((set_t *)s)->mask[g] = m;
    LEAVE(OK);
}

typedef struct {
    void *d;
    u64 type, data;
    u32 gi_, ci;
} ev_t;

API nvmlEventSetWait_v2(void *sp, ev_t *e, u32 ms) {
    set_t *s = sp;
    const char *p = getenv("FAKE_NVML_EVENTS");
    struct timespec t = {0, 5000000};
    u32 left = ms;
    for (;;) {
        pthread_mutex_lock(&lock);
        load();
        const char *er = node_text("err.nvmlEventSetWait_v2", NULL);
        if (er)
            LEAVE(atoi(er));
        FILE *f = p ? fopen(p, "r") : NULL;
        if (f) {
            fseek(f, s->off, SEEK_SET);
            char line[256];
            while (fgets(line, sizeof line, f)) {
                if (!strchr(line, '\n'))
                    break;
                s->off = ftell(f);
                char u[96];
                u64 x = 0;
                u32 a = 0xffffffff, b = 0xffffffff;
                if (sscanf(line, "%95s %llu %u %u", u, &x, &a, &b) < 2)
                    continue;
                for (int i = 0; i < count; i++)
                    if (!strcmp(gpu_text(i, "uuid", ""), u) && (s->mask[i] & 8)) {
                        e->d = &handles[i][0];
                        e->type = 8;
                        e->data = x;
                        e->gi_ = a;
                        e->ci = b;
                        fclose(f);
                        LEAVE(OK);
                    }
            }
            fclose(f);
        }
        pthread_mutex_unlock(&lock);
        if (left < 5)
            return TIMEOUT;
        nanosleep(&t, NULL);
        left -= 5;
    }
}

API nvmlEventSetWait(void *s, ev_t *e, u32 ms) {
    return nvmlEventSetWait_v2(s, e, ms);
}
