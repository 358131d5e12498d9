import itertools

import pytest
import torch
from models import config, make_net
from torch.utils.data import Dataset, IterableDataset

import zero
from zero.data import Loader, RepeatingLoader


class Numbers(Dataset):
    """The numbers below `count`; `read` remembers which were asked for."""

    def __init__(self, count):
        self.count = count
        self.read = []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.read.append(index)
        return index


class Stream(IterableDataset):
    def __init__(self, count):
        self.count = count
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        return iter(range(self.count))


class SizedStream(Stream):
    def __len__(self):
        return self.count


class Draw(Dataset):
    """Each sample is a random number, as an augmentation would draw it."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.rand(())


def loaders(count, world_size, batch_size, **options):
    return [
        Loader(Numbers(count), batch_size=batch_size, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]


def samples(batches):
    return [int(number) for batch in batches for number in batch]


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [4, 4, 2]), (True, [4, 4])])
def test_the_last_batch(drop_last, sizes):
    (loader,) = loaders(10, 1, 4, drop_last=drop_last)
    assert [len(batch) for batch in loader] == sizes
    assert len(loader) == len(sizes) and loader.batch_size == 4 and loader.dataset.count == 10


def test_each_pass_shuffles_anew_and_all_ranks_shuffle_alike():
    first, second = loaders(40, 2, 4)
    passes = [(samples(first), samples(second)) for _ in range(3)]
    for mine, other in passes:
        assert sorted(mine + other) == list(range(40))
    assert len({tuple(mine) for mine, _ in passes}) == 3


def test_a_pass_that_was_broken_off_is_over():
    (loader,) = loaders(20, 1, 4)
    orders = [samples(loader) for _ in range(2)]
    (other,) = loaders(20, 1, 4)
    assert samples(itertools.islice(other, 2)) == orders[0][:8]
    assert samples(other) == orders[1]


def test_two_passes_at_once_do_not_disturb_each_other():
    (loader,) = loaders(8, 1, 2)
    orders = [samples(loader) for _ in range(2)]
    (other,) = loaders(8, 1, 2)
    pairs = list(zip(other, other, strict=True))
    assert [samples(part) for part in zip(*pairs, strict=True)] == orders


def test_the_global_generator_is_not_touched():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    list(loaders(8, 1, 2)[0])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("seen", range(9))
def test_a_resumed_run_goes_on_behind_the_last_batch(seen):
    (whole,) = loaders(10, 1, 4)  # 3 batches per pass
    wanted = samples(itertools.islice(RepeatingLoader(whole), 12))
    (loader,) = loaders(10, 1, 4)
    before = samples(itertools.islice(RepeatingLoader(loader), seen))
    (resumed,) = loaders(10, 1, 4)
    batches = RepeatingLoader(resumed)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.state_dict()["epoch"] == seen // 3 or seen % 3 == 0
    after = samples(itertools.islice(batches, 12 - seen))
    assert before + after == wanted
    if seen < 3:
        assert resumed.dataset.read[: 10 - 4 * seen] == wanted[4 * seen : 10], "it read what it had seen"


def test_set_epoch_of_the_resumed_pass_keeps_its_position():
    (loader,) = loaders(20, 1, 4)
    whole = samples(loader)
    for epoch, wanted in ((0, whole[8:]), (1, samples(loader))):
        for by_sampler in (False, True):
            (seen,), (resumed,) = loaders(20, 1, 4), loaders(20, 1, 4)
            samples(itertools.islice(seen, 2))
            resumed.load_state_dict(seen.state_dict())
            (resumed.sampler if by_sampler else resumed).set_epoch(epoch)
            assert samples(resumed) == wanted


def test_collate_fn_makes_the_batch():
    (loader,) = loaders(4, 1, 2, collate_fn=lambda items: {"n": len(items)})
    assert list(loader) == [{"n": 2}, {"n": 2}]


def test_an_iterable_dataset_resumes_and_is_told_the_epoch():
    loader = Loader(Stream(8), batch_size=2, rank=1, world_size=2)
    with pytest.raises(TypeError):
        len(loader)
    assert samples(loader) == [1, 3, 5, 7]
    assert len(Loader(SizedStream(7), batch_size=2, rank=0, world_size=2)) == 2
    assert samples(itertools.islice(loader, 1)) == [1, 3]
    resumed = Loader(Stream(8), batch_size=2, rank=1, world_size=2)
    resumed.load_state_dict(loader.state_dict())
    assert samples(resumed) == [5, 7]
    assert loader.dataset.epochs == [0, 1] and resumed.dataset.epochs == [1]
    with pytest.raises(ValueError, match="sampler: an IterableDataset"):
        Loader(Stream(8), batch_size=2, rank=0, world_size=1, sampler=[1])


def test_workers_draw_other_numbers_on_each_rank_and_in_each_pass():
    def draw(rank):
        loader = Loader(Draw(), batch_size=2, rank=rank, world_size=2, num_workers=1)
        return [torch.cat(list(loader)).tolist() for _ in range(2)]

    first, second = draw(0), draw(1)
    assert len({number for run in (*first, *second) for number in run}) == 8
    assert draw(0) == first


def test_repeating_goes_on_for_ever():
    (loader,) = loaders(6, 1, 4)
    repeating = RepeatingLoader(loader)
    assert iter(repeating) is repeating and len(repeating) == 2
    batches = list(itertools.islice(repeating, 7))
    assert [len(batch) for batch in batches] == [4, 2] * 3 + [4]
    assert loader.epoch == 3
    assert [next(RepeatingLoader([1])) for _ in range(2)] == [1, 1]


def test_nothing_to_load_is_an_error_and_no_endless_loop():
    with pytest.raises(ValueError, match="dataset: wanted at least one sample"):
        Loader(Numbers(0), batch_size=1, rank=0, world_size=1)
    (loader,) = loaders(3, 1, 4, drop_last=True)
    with pytest.raises(RuntimeError, match="the loader has no batch"):
        next(RepeatingLoader(loader))


@pytest.mark.parametrize(
    ("dataset", "options", "text"),
    [
        (torch.utils.data.DataLoader(Numbers(4)), {}, r"got a DataLoader; wanted the dataset itself \(its .dataset\)"),
        ((number for number in range(4)), {}, "got a generator; wanted one with __len__ and __getitem__"),
        (Numbers(4), {"batch_size": 0}, "batch_size: got 0"),
        (Numbers(4), {"collate_fn": "stack"}, "collate_fn: got a str"),
    ],
)
def test_what_no_loader_can_be_made_of_is_said_at_once(dataset, options, text):
    with pytest.raises(ValueError, match=text):
        Loader(dataset, **{"batch_size": 2, **options}, rank=0, world_size=1)


def test_a_loader_of_the_engine_takes_the_arguments_of_deepspeed():
    engine, *_ = zero.initialize(model=make_net(), config=config(0, 1))
    in_order = engine.deepspeed_io(Numbers(5), 2, "eval", True, None, None, None)
    assert [samples(in_order), samples(in_order)] == [[0, 1, 2, 3, 4]] * 2
    assert samples(engine.deepspeed_io(Numbers(5), data_sampler=[3, 1])) == [3, 1]
    assert sorted(samples(engine.deepspeed_io(Numbers(5), collate_fn=torch.tensor))) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"route=...\): got 'test', wanted one of 'train', 'eval', 'predict'"):
        engine.deepspeed_io(Numbers(5), route="test")
    engine.destroy()
