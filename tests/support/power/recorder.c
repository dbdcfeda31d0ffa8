/* Records what a process changes below the folder POWER_ROOT, in order, in the file POWER_LOG (LD_PRELOAD).
 *
 * One record per change: a header, a path, a second path, data. Files are known by their inode, so that no table of
 * descriptors is needed. A change and its record are made under one lock, so the order of the records is the order of
 * the changes. What cannot be recorded is recorded as such ('?'), and cuts.py refuses the log.
 * stdio writes without calling write(), so a file opened with fopen is copied whole whenever it is synced or closed.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name)) real(#name))
#define STREAMS 256

struct __attribute__((packed)) record {
    uint8_t kind;
    uint64_t inode, offset, data;
    uint32_t path, other;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX], journal[PATH_MAX];
static size_t root_length;
static uint64_t streams[STREAMS]; /* inodes of files opened with fopen */

static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }
static void hold(void) { pthread_mutex_lock(&lock); }
static void let_go(void) { pthread_mutex_unlock(&lock); }

__attribute__((constructor)) static void start(void) {
    const char *folder = getenv("POWER_ROOT"), *log = getenv("POWER_LOG");
    if (!folder || !log || !realpath(folder, root)) {
        fprintf(stderr, "recorder: POWER_ROOT and POWER_LOG must be set\n");
        _exit(99);
    }
    root_length = strlen(root);
    snprintf(journal, sizeof journal, "%s", log);
    pthread_atfork(hold, let_go, let_go);
}

static void write_record(uint8_t kind, uint64_t inode, uint64_t offset, const char *path, const char *other,
                         const struct iovec *data, int count, size_t length) {
    int saved = errno;
    struct record header = {kind, inode, offset, length, strlen(path), strlen(other)};
    struct iovec parts[3 + count];
    parts[0] = (struct iovec){&header, sizeof header};
    parts[1] = (struct iovec){(void *)path, header.path};
    parts[2] = (struct iovec){(void *)other, header.other};
    int used = 3;
    for (size_t left = length; used < 3 + count && left; used++) {
        parts[used] = data[used - 3];
        if (parts[used].iov_len > left) parts[used].iov_len = left;
        left -= parts[used].iov_len;
    }
    size_t total = sizeof header + header.path + header.other + length;
    int descriptor = syscall(SYS_openat, AT_FDCWD, journal, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    ssize_t written = syscall(SYS_writev, descriptor, parts, used);
    syscall(SYS_close, descriptor);
    if (written != (ssize_t)total) {
        fprintf(stderr, "recorder: cannot write %s\n", journal);
        _exit(99);
    }
    errno = saved;
}

static void note(uint8_t kind, uint64_t inode, uint64_t offset, const char *path, const char *other) {
    write_record(kind, inode, offset, path, other, NULL, 0, 0);
}

static int inside(const char *path) {
    return root_length && !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

static int ends(const char *path, const char *end) {
    size_t length = strlen(path), part = strlen(end);
    return length >= part && !strcmp(path + length - part, end);
}

/* The path of an open file or folder below the root; 0 for all others. */
static int of_descriptor(int descriptor, char *path, struct stat *status) {
    char link[64];
    if (fstat(descriptor, status) || !(S_ISREG(status->st_mode) || S_ISDIR(status->st_mode))) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return inside(path) && !ends(path, "-shm"); /* SQLite builds that file anew */
}

/* The absolute path of a name; 0 if it is not below the root. The last part may not exist. */
static int of_name(int folder, const char *name, char *path) {
    char given[PATH_MAX], parent[PATH_MAX];
    if (name[0] == '/' || folder == AT_FDCWD) snprintf(given, sizeof given, "%s", name);
    else snprintf(given, sizeof given, "/proc/self/fd/%d/%s", folder, name);
    size_t length = strlen(given);
    while (length > 1 && given[length - 1] == '/') given[--length] = 0;
    char *slash = strrchr(given, '/');
    const char *last = slash ? slash + 1 : given;
    int saved = errno;
    int found = 0;
    if (slash == given) snprintf(parent, sizeof parent, "/");
    else if (slash) *slash = 0;
    if (slash == given || realpath(slash ? given : ".", parent)) {
        if ((size_t)snprintf(path, PATH_MAX, "%s/%s", parent, last) < PATH_MAX) found = inside(path);
    }
    errno = saved;
    return found && !ends(path, "-shm");
}

static int is_stream(uint64_t inode) {
    for (int i = 0; i < STREAMS; i++)
        if (streams[i] == inode) return 1;
    return 0;
}

static void copy_stream(int descriptor) {
    char link[64];
    struct stat status;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    int again = syscall(SYS_openat, AT_FDCWD, link, O_RDONLY | O_CLOEXEC, 0); /* stdio may have it for writing only */
    if (again < 0 || fstat(again, &status)) return;
    size_t length = status.st_size;
    char *content = malloc(length + 1);
    struct iovec part = {content, length};
    if (pread(again, content, length, 0) == (ssize_t)length)
        write_record('S', status.st_ino, 0, "", "", &part, 1, length);
    free(content);
    syscall(SYS_close, again);
}

/* --- opening ------------------------------------------------------------------------------------------------- */

static int opened(int folder, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    struct stat before, after;
    if (!(flags & (O_CREAT | O_TRUNC)) || (flags & O_TMPFILE) == O_TMPFILE || !of_name(folder, name, path))
        return syscall(SYS_openat, folder, name, flags | O_LARGEFILE, mode);
    hold();
    int was_there = !lstat(path, &before);
    int descriptor = syscall(SYS_openat, folder, name, flags | O_LARGEFILE, mode);
    if (descriptor >= 0 && !fstat(descriptor, &after)) {
        if (!was_there) note('c', after.st_ino, 0, path, "");
        else if ((flags & O_TRUNC) && before.st_size) note('t', after.st_ino, 0, path, "");
        if (flags & O_DSYNC) note('?', after.st_ino, 0, "O_SYNC", path);
    }
    let_go();
    return descriptor;
}

#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { \
        va_list rest; \
        va_start(rest, flags); \
        mode = va_arg(rest, mode_t); \
        va_end(rest); \
    }

int open(const char *name, int flags, ...) { MODE(flags) return opened(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE(flags) return opened(AT_FDCWD, name, flags, mode); }
int openat(int folder, const char *name, int flags, ...) { MODE(flags) return opened(folder, name, flags, mode); }
int openat64(int folder, const char *name, int flags, ...) { MODE(flags) return opened(folder, name, flags, mode); }
int creat(const char *name, mode_t mode) { return opened(AT_FDCWD, name, O_WRONLY | O_CREAT | O_TRUNC, mode); }

static FILE *stream(const char *name, const char *mode, FILE *(*open_stream)(const char *, const char *)) {
    char path[PATH_MAX];
    struct stat before, after;
    if (mode[0] == 'r' || !of_name(AT_FDCWD, name, path)) return open_stream(name, mode);
    hold();
    int was_there = !lstat(path, &before);
    FILE *file = open_stream(name, mode);
    if (file && !fstat(fileno(file), &after)) {
        if (!was_there) note('c', after.st_ino, 0, path, "");
        else if (mode[0] == 'w' && before.st_size) note('t', after.st_ino, 0, path, "");
        for (int i = 0; i < STREAMS && !is_stream(after.st_ino); i++)
            if (!streams[i]) streams[i] = after.st_ino;
    }
    let_go();
    return file;
}

FILE *fopen(const char *name, const char *mode) { return stream(name, mode, REAL(fopen)); }
FILE *fopen64(const char *name, const char *mode) { return stream(name, mode, REAL(fopen64)); }

int fclose(FILE *file) {
    struct stat status;
    if (fileno(file) >= 0 && !fstat(fileno(file), &status) && is_stream(status.st_ino)) {
        fflush(file);
        hold();
        copy_stream(fileno(file));
        let_go();
    }
    return REAL(fclose)(file);
}

/* --- data ---------------------------------------------------------------------------------------------------- */

#define RECORDED(descriptor, call, at, parts, count) \
    char path[PATH_MAX]; \
    struct stat status; \
    if (!of_descriptor(descriptor, path, &status) || !S_ISREG(status.st_mode)) return call; \
    hold(); \
    ssize_t written = call; \
    if (written > 0) write_record('w', status.st_ino, at, "", "", parts, count, written); \
    let_go(); \
    return written

#define POSITION(descriptor) (syscall(SYS_lseek, descriptor, 0, SEEK_CUR) - written)

ssize_t write(int descriptor, const void *data, size_t length) {
    struct iovec part = {(void *)data, length};
    RECORDED(descriptor, syscall(SYS_write, descriptor, data, length), POSITION(descriptor), &part, 1);
}

ssize_t pwrite(int descriptor, const void *data, size_t length, off_t offset) {
    struct iovec part = {(void *)data, length};
    RECORDED(descriptor, syscall(SYS_pwrite64, descriptor, data, length, offset), offset, &part, 1);
}

ssize_t pwrite64(int descriptor, const void *data, size_t length, off64_t offset) {
    return pwrite(descriptor, data, length, offset);
}

ssize_t writev(int descriptor, const struct iovec *parts, int count) {
    RECORDED(descriptor, syscall(SYS_writev, descriptor, parts, count), POSITION(descriptor), parts, count);
}

ssize_t pwritev(int descriptor, const struct iovec *parts, int count, off_t offset) {
    RECORDED(descriptor, REAL(pwritev)(descriptor, parts, count, offset), offset, parts, count);
}

ssize_t pwritev64(int descriptor, const struct iovec *parts, int count, off64_t offset) {
    return pwritev(descriptor, parts, count, offset);
}

int ftruncate(int descriptor, off_t length) {
    char path[PATH_MAX];
    struct stat status;
    if (!of_descriptor(descriptor, path, &status)) return syscall(SYS_ftruncate, descriptor, length);
    hold();
    int failed = syscall(SYS_ftruncate, descriptor, length);
    if (!failed) note('t', status.st_ino, length, path, "");
    let_go();
    return failed;
}

int ftruncate64(int descriptor, off64_t length) { return ftruncate(descriptor, length); }

static int synced(int descriptor, int number) {
    char path[PATH_MAX];
    struct stat status;
    if (!of_descriptor(descriptor, path, &status)) return syscall(number, descriptor);
    hold();
    int failed = syscall(number, descriptor);
    if (!failed && is_stream(status.st_ino)) copy_stream(descriptor);
    if (!failed) note('s', status.st_ino, 0, path, "");
    let_go();
    return failed;
}

int fsync(int descriptor) { return synced(descriptor, SYS_fsync); }
int fdatasync(int descriptor) { return synced(descriptor, SYS_fdatasync); }

/* --- names --------------------------------------------------------------------------------------------------- */

static uint64_t inode_of(const char *path) {
    struct stat status;
    return lstat(path, &status) ? 0 : status.st_ino;
}

static int two_names(uint8_t kind, int from, const char *old, int to, const char *new, long number, int flags) {
    char path[PATH_MAX], other[PATH_MAX];
    int was_inside = of_name(from, old, path), is_inside = of_name(to, new, other);
    if (!was_inside && !is_inside) return syscall(number, from, old, to, new, flags);
    hold();
    int failed = syscall(number, from, old, to, new, flags);
    if (!failed && was_inside && is_inside && !(kind == 'r' && (flags & ~RENAME_NOREPLACE)))
        note(kind, inode_of(other), 0, path, other);
    else if (!failed) note('?', 0, 0, "a rename or link across the root, or an exchange", other);
    let_go();
    return failed;
}

int rename(const char *old, const char *new) {
    return two_names('r', AT_FDCWD, old, AT_FDCWD, new, SYS_renameat2, 0);
}

int renameat(int from, const char *old, int to, const char *new) {
    return two_names('r', from, old, to, new, SYS_renameat2, 0);
}

int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
    return two_names('r', from, old, to, new, SYS_renameat2, flags);
}

int link(const char *old, const char *new) { return two_names('l', AT_FDCWD, old, AT_FDCWD, new, SYS_linkat, 0); }

int linkat(int from, const char *old, int to, const char *new, int flags) {
    return two_names('l', from, old, to, new, SYS_linkat, flags);
}

static int removed(int folder, const char *name, int flags) {
    char path[PATH_MAX];
    if (!of_name(folder, name, path)) return syscall(SYS_unlinkat, folder, name, flags);
    hold();
    int failed = syscall(SYS_unlinkat, folder, name, flags);
    if (!failed) note('x', 0, 0, path, "");
    let_go();
    return failed;
}

int unlink(const char *name) { return removed(AT_FDCWD, name, 0); }
int unlinkat(int folder, const char *name, int flags) { return removed(folder, name, flags); }
int rmdir(const char *name) { return removed(AT_FDCWD, name, AT_REMOVEDIR); }

int remove(const char *name) {
    struct stat status;
    int is_folder = !lstat(name, &status) && S_ISDIR(status.st_mode);
    return removed(AT_FDCWD, name, is_folder ? AT_REMOVEDIR : 0);
}

int mkdirat(int folder, const char *name, mode_t mode) {
    char path[PATH_MAX];
    if (!of_name(folder, name, path)) return syscall(SYS_mkdirat, folder, name, mode);
    hold();
    int failed = syscall(SYS_mkdirat, folder, name, mode);
    if (!failed) note('d', inode_of(path), 0, path, "");
    let_go();
    return failed;
}

int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

/* --- what is not recorded ------------------------------------------------------------------------------------ */

static void refuse(int descriptor, const char *what) {
    char path[PATH_MAX];
    struct stat status;
    if (of_descriptor(descriptor, path, &status)) note('?', status.st_ino, 0, what, path);
}

void *mmap(void *address, size_t length, int protection, int flags, int descriptor, off_t offset) {
    if (descriptor >= 0 && (protection & PROT_WRITE) && (flags & MAP_SHARED)) refuse(descriptor, "mmap");
    return (void *)syscall(SYS_mmap, address, length, protection, flags, descriptor, offset);
}

void *mmap64(void *address, size_t length, int protection, int flags, int descriptor, off64_t offset) {
    return mmap(address, length, protection, flags, descriptor, offset);
}

int fallocate(int descriptor, int mode, off_t offset, off_t length) {
    refuse(descriptor, "fallocate");
    return syscall(SYS_fallocate, descriptor, mode, offset, length);
}

int posix_fallocate(int descriptor, off_t offset, off_t length) {
    refuse(descriptor, "posix_fallocate");
    return REAL(posix_fallocate)(descriptor, offset, length);
}

ssize_t sendfile(int to, int from, off_t *offset, size_t length) {
    refuse(to, "sendfile");
    return syscall(SYS_sendfile, to, from, offset, length);
}

ssize_t sendfile64(int to, int from, off64_t *offset, size_t length) { return sendfile(to, from, offset, length); }

ssize_t copy_file_range(int from, off64_t *start, int to, off64_t *end, size_t length, unsigned flags) {
    refuse(to, "copy_file_range");
    return syscall(SYS_copy_file_range, from, start, to, end, length, flags);
}
