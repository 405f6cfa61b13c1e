"""Three kinds of text, a few hundred tokens each: prose, code and a conversation."""

from __future__ import annotations

PROSE = """\
The river had risen in the night. By morning it stood at the third step of the mill, brown and quick, and \
carried branches past the window as if it had somewhere to be. The miller's daughter counted the sacks, moved \
the lowest ones up to the loft, and then sat down on the stairs to wait. Her father came in wet to the knees. He \
said that the bridge would hold; it had held in worse years, when he was a boy and the water came up to the door \
of the church. She asked him who had built it. Nobody knew for certain, he said, but there were marks on the \
stones under the second arch, a fish and a pair of compasses, and masons who came through the valley always \
stopped to look at them. In the afternoon the rain ended. Clouds went over the hills one after another, each a \
little lighter than the last, and the first swifts of the year hunted above the meadow. The level fell by the \
width of a hand, then by two. When the sun had gone down they opened the gate again, slowly, a notch at a time, \
and the great wheel began to turn. It takes about an hour until the stones are warm, and flour that is ground \
before that is coarse and grey; so the first sack is always kept for the hens. In 1868 a commission measured all \
the mills of the district. It found that ours had a fall of 2.3 metres and gave about 11 horse powers, which was \
more than the two below it together, and the tax was raised accordingly."""

CODE = '''\
def merge_intervals(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join those that touch or overlap; the result is in order."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


class Counter:
    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, word: str, n: int = 1) -> None:
        if n < 0:
            raise ValueError(f"cannot add {n} of {word!r}")
        self._counts[word] = self._counts.get(word, 0) + n

    def most_common(self, k: int) -> list[tuple[str, int]]:
        return sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))[:k]


if __name__ == "__main__":
    counter = Counter()
    with open("words.txt", encoding="utf-8") as file:
        for line in file:
            for word in line.lower().split():
                counter.add(word.strip(".,;:!?"))
    for word, count in counter.most_common(10):
        print(f"{count:6d}  {word}")
'''

CHAT = """\
User: My bread comes out flat and dense. What am I doing wrong?
Assistant: There are a few usual reasons. The yeast may be old: stir a spoonful into warm water with some sugar, and \
see whether it foams within ten minutes. The dough may be too dry, or it did not rise for long enough. How long do you \
let it stand, and how warm is your kitchen?
User: About an hour, and it is rather cold in winter, perhaps 17 degrees.
Assistant: Then time is the likely cause. At 17 degrees a dough needs two to three hours for what takes one hour at 25 \
degrees. You can put the bowl into the oven with only the light on, or let it stand in the refrigerator over night and \
bake in the morning. Do not go by the clock: the dough is ready when it has about doubled, and when a dent that you \
press with a finger comes back slowly.
User: Thanks! And how do I get a crisp crust?
Assistant: Steam at the beginning, and enough heat. Heat the oven to 240 degrees with a heavy tray in it, put the loaf \
on the hot tray, pour half a cup of water into a second tray below, and close the door quickly. After 15 minutes let \
the steam out and turn the oven down to 210 degrees for another 25 to 30 minutes."""

TEXTS = {"prose": PROSE, "code": CODE, "chat": CHAT}
