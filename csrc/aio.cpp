// Requests, their queue and the pool of workers; the workers that call pread and pwrite.
#include "aio.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <stdexcept>
#include <thread>

namespace zero {
namespace {

// How often a transfer that could not begin is tried again before that is an error.
constexpr int kTries = 1000;

int64_t transfer(const AioBlock& block) {
  const auto count = static_cast<size_t>(block.nbytes());
  const ssize_t moved = block.write() ? pwrite(block.fd(), block.data(), count, block.offset())
                                      : pread(block.fd(), block.data(), count, block.offset());
  return moved < 0 ? -errno : moved;
}

void run_thread(AioQueue& queue) {
  std::vector<AioBlock> blocks;
  while (queue.take(blocks, 1, true)) {
    for (AioBlock& block : blocks) {
      while (!block.advance(transfer(block))) {
      }
    }
    blocks.clear();
  }
}

}  // namespace

AioRequest::AioRequest(const AioSpan& span, int64_t block)
    : span_(span), block_(block), left_((span.nbytes + block - 1) / block), outcome_{0, span.nbytes} {}

bool AioRequest::wait(int milliseconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  return finished_.wait_for(lock, std::chrono::milliseconds(milliseconds), [this] { return left_ == 0; });
}

AioOutcome AioRequest::outcome() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return outcome_;
}

void AioRequest::finish(int error, int64_t reached) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // Blocks are taken in order: all before the first that failed were moved, or are on their way.
  if (error != 0 && (outcome_.error == 0 || reached < outcome_.reached)) outcome_ = AioOutcome{error, reached};
  if (--left_ == 0) finished_.notify_all();
}

AioBlock::AioBlock(std::shared_ptr<AioRequest> request, int64_t begin, int64_t end)
    : request_(std::move(request)), at_(begin), end_(end) {}

bool AioBlock::advance(int64_t result) {
  if ((result == -EINTR || result == -EAGAIN) && ++again_ < kTries) return false;
  if (result < 0) {
    request_->finish(static_cast<int>(-result), at_);
    return true;
  }
  if (result >= nbytes()) {
    request_->finish(0, end_);
    return true;
  }
  // A read that stops early has met the end of the file. The rest is asked for all the same: only a transfer that
  // makes no way says that there is nothing more.
  const int64_t align = request_->span_.align, way = result / align * align;
  if (way == 0) {
    request_->finish(kAioShort, at_ + result);
    return true;
  }
  at_ += way;
  again_ = 0;
  return false;
}

std::shared_ptr<AioRequest> AioQueue::submit(const AioSpan& span) {
  auto request = std::make_shared<AioRequest>(span, block_);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) throw std::runtime_error("this pool of workers was closed");
  if (request->left_ == 0) return request;
  requests_.push_back(request);
  blocks_ += request->left_;
  arrived_.notify_all();
  return request;
}

bool AioQueue::take(std::vector<AioBlock>& out, int64_t room, bool patient) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (patient) arrived_.wait(lock, [this] { return closed_ || !requests_.empty(); });
  if (requests_.empty()) return !closed_;
  int64_t share = std::min(room, (blocks_ + workers_ - 1) / workers_);
  while (share > 0 && !requests_.empty()) {
    const std::shared_ptr<AioRequest> request = requests_.front();
    const int64_t begin = request->next_, end = std::min(begin + request->block_, request->span_.nbytes);
    request->next_ = end;
    if (end == request->span_.nbytes) requests_.pop_front();
    --blocks_;
    AioBlock block(request, begin, end);
    if (request->outcome().error != 0) {
      block.skip();
    } else {
      out.push_back(std::move(block));
      --share;
    }
  }
  return true;
}

void AioQueue::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  arrived_.notify_all();
}

struct AioPool::State {
  State(int workers, int64_t block) : queue(workers, block) {}
  ~State() { close(); }

  // Workers take no signals: the handlers are the program's, and would cut transfers short.
  template <class Run>
  void start(const Run& run) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      threads.emplace_back(run);
    } catch (...) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void close() {
    queue.close();
    const std::lock_guard<std::mutex> lock(closing);
    for (std::thread& thread : threads) thread.join();
    threads.clear();
  }

  AioQueue queue;
  std::vector<std::unique_ptr<AioRing>> rings;
  std::mutex closing;  // two threads may close
  std::vector<std::thread> threads;
};

AioPool::AioPool(int workers, int depth, int64_t block, bool uring) : pid_(getpid()) {
  if (workers < 1 || depth < 1 || block < 1) throw std::invalid_argument("workers, depth and block must be positive");
  const int64_t wanted = uring ? workers : std::min<int64_t>(int64_t{workers} * depth, kMaxThreads);
  const int count = static_cast<int>(wanted);
  state_ = std::make_unique<State>(count, block);
  State* state = state_.get();
  for (int i = 0; i < count; ++i) {
    if (uring) {
      state->rings.push_back(AioRing::make(depth));
      AioRing* ring = state->rings.back().get();
      state->start([state, ring] { ring->run(state->queue); });
    } else {
      state->start([state] { run_thread(state->queue); });
    }
  }
}

AioPool::~AioPool() {
  if (getpid() != pid_) static_cast<void>(state_.release());
}

std::shared_ptr<AioRequest> AioPool::submit(const AioSpan& span) { return state_->queue.submit(span); }

void AioPool::close() { state_->close(); }

}  // namespace zero
