// Reads and writes of files that go on beside the program: a request is cut into blocks, which a few workers move.
// Addresses and file descriptors come from zero/kernels/aio.py, which checks them and keeps them alive.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace zero {

// Not an errno: the file ended before a read did, or took nothing more of a write.
constexpr int kAioShort = -1;

// What is to be moved: `nbytes` bytes between `data` and the file from `offset` on. A transfer that stopped early goes
// on at a multiple of `align` bytes behind its start, which files opened with O_DIRECT insist on; 1 for others.
struct AioSpan {
  bool write;
  int fd;
  char* data;
  int64_t nbytes;
  int64_t offset;
  int64_t align;
};

// error: 0, an errno or kAioShort. reached: all bytes of the span before this one were moved.
struct AioOutcome {
  int error;
  int64_t reached;
};

class AioRequest {
 public:
  AioRequest(const AioSpan& span, int64_t block);

  // Wait until all workers have let go of the memory and the file, at most this long; whether they have.
  bool wait(int milliseconds);
  bool done() { return wait(0); }
  AioOutcome outcome();

 private:
  friend class AioQueue;
  friend class AioBlock;
  void finish(int error, int64_t reached);  // one block; error as in AioOutcome

  const AioSpan span_;
  const int64_t block_;
  int64_t next_ = 0;  // the first byte that no worker took yet; guarded by the queue
  std::mutex mutex_;
  std::condition_variable finished_;
  int64_t left_;  // blocks
  AioOutcome outcome_;
};

// A part of a request on its way. Keeps the request alive.
class AioBlock {
 public:
  AioBlock() = default;
  AioBlock(std::shared_ptr<AioRequest> request, int64_t begin, int64_t end);

  bool write() const { return request_->span_.write; }
  int fd() const { return request_->span_.fd; }
  char* data() const { return request_->span_.data + at_; }
  int64_t nbytes() const { return end_ - at_; }
  int64_t offset() const { return request_->span_.offset + at_; }

  // Take the result of a transfer, a number of bytes or -errno; whether the block is done with. If not, the rest, which
  // data(), nbytes() and offset() say now, is to be moved next.
  bool advance(int64_t result);
  // Nothing is moved any more, since the request has failed elsewhere.
  void skip() { request_->finish(0, 0); }

 private:
  std::shared_ptr<AioRequest> request_;
  int64_t at_ = 0, end_ = 0;
  int again_ = 0;
};

// What waits for a worker, first come, first served.
class AioQueue {
 public:
  AioQueue(int workers, int64_t block) : workers_(workers), block_(block) {}

  std::shared_ptr<AioRequest> submit(const AioSpan& span);
  // Add at most `room` blocks to `out`, a fair part of what waits; with `patient` wait for the first. False: nothing
  // waits and nothing will come any more.
  bool take(std::vector<AioBlock>& out, int64_t room, bool patient);
  // No more requests; workers go once nothing waits.
  void close();

 private:
  const int64_t workers_, block_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<std::shared_ptr<AioRequest>> requests_;
  int64_t blocks_ = 0;  // of these requests, not yet taken
  bool closed_ = false;
};

class AioPool {
 public:
  // Blocks of `block` bytes, at most `depth` of each of `workers` in flight. With `uring` through io_uring: throws
  // std::runtime_error with the reason where the kernel does not offer it. Otherwise by threads that call pread and
  // pwrite, workers * depth of them, yet at most kMaxThreads.
  AioPool(int workers, int depth, int64_t block, bool uring);
  // Closes. In a process that was forked from the pool's there are no workers to wait for: the memory stays then.
  ~AioPool();
  AioPool(const AioPool&) = delete;
  AioPool& operator=(const AioPool&) = delete;

  std::shared_ptr<AioRequest> submit(const AioSpan& span);
  // Wait until all requests are done, and end the workers. Again: nothing.
  void close();

  static constexpr int kMaxThreads = 64;

 private:
  struct State;
  std::unique_ptr<State> state_;
  const int64_t pid_;
};

// One worker's ring of io_uring. Made in one thread, run in one other.
class AioRing {
 public:
  // Throws std::runtime_error with the reason where there is none to be had.
  static std::unique_ptr<AioRing> make(int depth);
  virtual ~AioRing() = default;
  // Move blocks of the queue until it is closed and empty.
  virtual void run(AioQueue& queue) = 0;
};

}  // namespace zero
