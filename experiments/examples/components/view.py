"""A view of your own: a tall matrix that stores two projections is split into two matrices.

In an experiment:

    imports: [view.py]
    recipe: {base: soap, routes: [], view: {kind: halves, ratio: 4}}
"""

from typing import Literal

from pydantic import Field

from eigengraft.blocking import Matrices, ModuleFacts, View, ViewChoice


class Halves(View):
    """Split matrices [m, n] with m >= ratio n and even m into two matrices [m / 2, n]; leave other parameters as they
    are.
    """

    kind: Literal["halves"] = "halves"
    ratio: float = Field(default=4.0, gt=0, description="least ratio of rows to columns with which a matrix is split")

    def of(self, shape: tuple[int, ...], facts: ModuleFacts) -> ViewChoice:
        if len(shape) != 2 or shape[0] % 2 or shape[0] < self.ratio * shape[1]:
            return ViewChoice(Matrices())
        half = shape[0] // 2
        return ViewChoice(Matrices(sections=(half, half)), "two projections in one")


if __name__ == "__main__":
    from eigengraft.testing import check_view

    print(check_view(Halves(), shapes=((8, 2), (6, 4), (5,))))
