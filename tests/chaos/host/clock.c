/* Shifts the wall clock of a process by the nanoseconds in the file that CHAOS_CLOCK names, which may change at any
   time. As when a clock is set, CLOCK_REALTIME moves and CLOCK_MONOTONIC does not.

   Deadlines on the wall clock are shifted back, since the kernel does not know of the shift. A wait that has begun keeps
   its length; the kernel would end it earlier or later.

   The second number in the file is how many nanoseconds fsync and fdatasync take longer. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL
#define WALL 1000000000 /* s; deadlines on the monotonic clock are smaller, since it counts from the boot */

static const volatile int64_t *shift;
static int (*real_gettime)(clockid_t, struct timespec *);
static int (*real_cond)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
static int (*real_sem)(sem_t *, const struct timespec *);
static int (*real_fsync)(int);
static int (*real_fdatasync)(int);

static void *next(const char *name) {
    static const char *versions[] = {"GLIBC_2.3.2", "GLIBC_2.17", "GLIBC_2.2.5"};
    for (size_t i = 0; i < sizeof(versions) / sizeof(*versions); i++) {
        void *found = dlvsym(RTLD_NEXT, name, versions[i]); /* dlsym would return the oldest */
        if (found) return found;
    }
    return dlsym(RTLD_NEXT, name);
}

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    real_gettime = next("clock_gettime");
    real_cond = next("pthread_cond_timedwait");
    real_sem = next("sem_timedwait");
    real_fsync = next("fsync");
    real_fdatasync = next("fdatasync");
    if (file < 0) return;
    void *map = mmap(NULL, 2 * sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (map != MAP_FAILED) shift = map;
}

static void move(struct timespec *time, int64_t by) {
    int64_t whole = time->tv_sec * SECOND + time->tv_nsec + by;
    time->tv_sec = whole / SECOND;
    time->tv_nsec = whole % SECOND;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    int result = real_gettime ? real_gettime(clock, time) : (int)syscall(SYS_clock_gettime, clock, time);
    if (result == 0 && shift && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) move(time, *shift);
    return result;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    struct timespec now;
    int result = clock_gettime(CLOCK_REALTIME, &now);
    (void)zone;
    time->tv_sec = now.tv_sec;
    time->tv_usec = now.tv_nsec / 1000;
    return result;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}

static const struct timespec *true_time(const struct timespec *deadline, struct timespec *moved) {
    if (!shift || deadline->tv_sec < WALL) return deadline;
    *moved = *deadline;
    move(moved, -*shift);
    return moved;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *deadline) {
    struct timespec moved;
    return real_cond(condition, mutex, true_time(deadline, &moved));
}

int sem_timedwait(sem_t *semaphore, const struct timespec *deadline) {
    struct timespec moved;
    return real_sem(semaphore, true_time(deadline, &moved));
}

static void take_time(void) {
    int64_t nanoseconds = shift ? shift[1] : 0;
    struct timespec left = {nanoseconds / SECOND, nanoseconds % SECOND};
    while (nanosleep(&left, &left) != 0) continue;
}

int fsync(int file) {
    take_time();
    return real_fsync(file);
}

int fdatasync(int file) {
    take_time();
    return real_fdatasync(file);
}
