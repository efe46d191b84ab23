from itertools import count, islice

from torch.utils.data import IterableDataset

from roomier.data import Mixture, ShuffleBuffer


class Lines(IterableDataset):
    def __init__(self, source):
        self.source = source

    def __iter__(self):
        return (f"{self.source} {number}" for number in count())


def stream():
    web = ShuffleBuffer(Lines("web"), size=100, seed=1)
    code = ShuffleBuffer(Lines("code"), size=100, seed=2)
    return Mixture([web, code], weights=[0.75, 0.25])


whole = list(islice(stream(), 1000))
print(whole[:4], sum(each.startswith("code") for each in whole))

interrupted, resumed = stream(), stream()
first = list(islice(interrupted, 600))
resumed.load_state_dict(interrupted.state_dict())
print(first + list(islice(resumed, 400)) == whole)
