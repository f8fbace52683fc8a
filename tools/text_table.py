"""Tables of texts, as the commands print them."""

from collections.abc import Collection, Sequence


def text_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str]
) -> list[str]:
    """Lines with columns as wide as what stands in them; those named in `right` are flush right."""
    shown = [columns, *rows]
    widths = [max(len(row[index]) for row in shown) for index in range(len(columns))]
    return ["  ".join(_cells(row, widths, columns, right)).rstrip() for row in shown]


def _cells(
    row: Sequence[str], widths: Sequence[int], columns: Sequence[str], right: Collection[str]
) -> list[str]:
    return [
        text.rjust(width) if column in right else text.ljust(width)
        for text, width, column in zip(row, widths, columns, strict=True)
    ]
