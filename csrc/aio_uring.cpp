// The workers that move blocks through io_uring, by its system calls alone (the man pages io_uring(7), io_uring_setup(2)
// and io_uring_enter(2)).
#include <stdexcept>

#include "aio.h"

#if defined(__linux__) && defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/syscall.h>
#if defined(__NR_io_uring_setup) && defined(IORING_FEAT_SINGLE_MMAP)
#define ZERO_HAVE_URING
#endif
#endif
#endif

#ifndef ZERO_HAVE_URING

std::unique_ptr<zero::AioRing> zero::AioRing::make(int) {
  throw std::runtime_error("io_uring was not there when this was compiled");
}

#else

#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

namespace zero {
namespace {

// A kernel that is short of memory answers EAGAIN; after so many milliseconds of that it is an error.
constexpr int kPatience = 10000;

std::runtime_error failed(const char* call) {
  return std::runtime_error(std::string(call) + ": " + std::strerror(errno));
}

// Memory that a ring shares with the kernel; a forked process has no use for it.
class Mapping {
 public:
  Mapping(int fd, size_t nbytes, off_t what) : nbytes_(nbytes) {
    data_ = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what);
    if (data_ == MAP_FAILED) throw failed("mmap of io_uring");
    madvise(data_, nbytes, MADV_DONTFORK);
  }
  ~Mapping() { munmap(data_, nbytes_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  template <class T>
  T* at(unsigned offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(data_) + offset);
  }

 private:
  void* data_;
  size_t nbytes_;
};

class Fd {
 public:
  explicit Fd(int fd) : fd_(fd) {}
  ~Fd() { close(fd_); }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

class Ring final : public AioRing {
 public:
  Ring(int fd, const io_uring_params& params, int depth)
      : fd_(fd),
        queues_(fd, std::max(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                             params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe)),
                IORING_OFF_SQ_RING),
        entries_(fd, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES),
        sq_tail_(queues_.at<unsigned>(params.sq_off.tail)),
        sq_mask_(*queues_.at<unsigned>(params.sq_off.ring_mask)),
        sq_array_(queues_.at<unsigned>(params.sq_off.array)),
        cq_head_(queues_.at<unsigned>(params.cq_off.head)),
        cq_tail_(queues_.at<unsigned>(params.cq_off.tail)),
        cq_mask_(*queues_.at<unsigned>(params.cq_off.ring_mask)),
        cqes_(queues_.at<io_uring_cqe>(params.cq_off.cqes)),
        blocks_(depth),
        vectors_(depth) {
    for (int slot = depth - 1; slot >= 0; --slot) free_.push_back(slot);
  }

  // Send one operation that does nothing there and back: a filter of system calls may let only some of them pass.
  void probe() {
    push(0, IORING_OP_NOP);
    while (enter() < 0) {
      if (errno != EINTR && errno != EAGAIN) throw failed("io_uring_enter");
    }
    __atomic_store_n(cq_head_, __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE), __ATOMIC_RELEASE);
  }

  void run(AioQueue& queue) override {
    std::vector<AioBlock> fresh;
    const size_t depth = blocks_.size();
    while (true) {
      const bool idle = free_.size() == depth;
      if (!free_.empty() && !queue.take(fresh, static_cast<int64_t>(free_.size()), idle) && idle) return;
      for (AioBlock& block : fresh) {
        const int slot = free_.back();
        free_.pop_back();
        blocks_[slot] = std::move(block);
        push_block(slot);
      }
      fresh.clear();
      if (free_.size() == depth) continue;
      if (enter() < 0) stumble(errno);
      reap();
    }
  }

 private:
  void push(int slot, int operation) {
    const unsigned tail = *sq_tail_, index = tail & sq_mask_;  // nobody else writes it
    io_uring_sqe* entry = entries_.at<io_uring_sqe>(index * sizeof(io_uring_sqe));
    std::memset(entry, 0, sizeof *entry);
    entry->opcode = static_cast<uint8_t>(operation);
    entry->user_data = static_cast<uint64_t>(slot);
    if (operation != IORING_OP_NOP) {
      const AioBlock& block = blocks_[slot];
      vectors_[slot] = iovec{block.data(), static_cast<size_t>(block.nbytes())};
      entry->fd = block.fd();
      entry->off = static_cast<uint64_t>(block.offset());
      entry->addr = reinterpret_cast<uint64_t>(&vectors_[slot]);
      entry->len = 1;
    }
    sq_array_[index] = index;
    __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
    pushed_.push_back(slot);
  }

  void push_block(int slot) { push(slot, blocks_[slot].write() ? IORING_OP_WRITEV : IORING_OP_READV); }

  // Hand over what was pushed and wait for one completion.
  int enter() {
    const auto taken = static_cast<int>(syscall(__NR_io_uring_enter, fd_.get(), static_cast<unsigned>(pushed_.size()),
                                                1u, IORING_ENTER_GETEVENTS, nullptr, size_t{0}));
    if (taken >= 0) {
      pushed_.erase(pushed_.begin(), pushed_.begin() + taken);
      stumbles_ = 0;
    }
    return taken;
  }

  // The kernel took nothing. What it has already it will complete, so nothing but what was pushed may be given up.
  void stumble(int error) {
    if (error == EINTR) return;
    usleep(1000);
    if ((error == EAGAIN || error == EBUSY) && ++stumbles_ < kPatience) return;
    __atomic_store_n(sq_tail_, *sq_tail_ - static_cast<unsigned>(pushed_.size()), __ATOMIC_RELEASE);
    for (const int slot : pushed_) {
      while (!blocks_[slot].advance(-error)) {
      }
      release(slot);
    }
    pushed_.clear();
  }

  void release(int slot) {
    blocks_[slot] = AioBlock();
    free_.push_back(slot);
  }

  void reap() {
    unsigned head = *cq_head_;  // nobody else writes it
    const unsigned tail = __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE);
    for (; head != tail; ++head) {
      const io_uring_cqe& event = cqes_[head & cq_mask_];
      const auto slot = static_cast<int>(event.user_data);
      if (blocks_[slot].advance(event.res)) {
        release(slot);
      } else {
        push_block(slot);
      }
    }
    __atomic_store_n(cq_head_, head, __ATOMIC_RELEASE);
  }

  const Fd fd_;
  const Mapping queues_, entries_;
  unsigned* const sq_tail_;
  const unsigned sq_mask_;
  unsigned* const sq_array_;
  unsigned* const cq_head_;
  unsigned* const cq_tail_;
  const unsigned cq_mask_;
  const io_uring_cqe* const cqes_;

  std::vector<AioBlock> blocks_;  // by slot, which is the user_data of its operation
  std::vector<iovec> vectors_;    // read by the kernel until the operation is complete
  std::vector<int> free_;         // slots without a block
  std::vector<int> pushed_;       // slots that the kernel did not take yet, oldest first
  int stumbles_ = 0;              // in a row
};

}  // namespace

std::unique_ptr<AioRing> AioRing::make(int depth) {
  io_uring_params params;
  std::memset(&params, 0, sizeof params);
  const auto fd = static_cast<int>(syscall(__NR_io_uring_setup, static_cast<unsigned>(depth), &params));
  if (fd < 0) throw failed("io_uring_setup");
  if ((params.features & IORING_FEAT_SINGLE_MMAP) == 0) {
    close(fd);
    throw std::runtime_error("io_uring of a kernel older than 5.4");
  }
  auto ring = std::make_unique<Ring>(fd, params, depth);
  ring->probe();
  return ring;
}

}  // namespace zero

#endif
