from trainwright.doctor import NotApplicable, Results, RunContext, check
from trainwright.doctor.facts.data import SamplesFacts

MIN_MIRRORED, MIN_EVALUATED = 4, 32


@check(points_at="dataset", stage="label", confidence=0.9)
def mirrored_without_swap(run: RunContext, facts: SamplesFacts) -> Results:
    """Images are mirrored, but their left and right keypoints are not exchanged, so half of the labels are wrong.

    Why it matters: the left shoulder of a mirrored person is labelled as the right one. The model predicts a point in
    between.

    How it is detected: points (x, y) of samples are kept and compared when the samples are read again. In at least four
    of them all x were mirrored, and no point has changed its place in the list. In the validation samples, which are
    not mirrored, one point is always on the right of another; mirrored labels contradict it.

    Exceptions: points in no fixed order, such as the ends of an object that may face both sides.

    Usual cause: a horizontal flip computes `x = width - 1 - x` without exchanging the pairs; or the corners of boxes
    (x1, y1, x2, y2) are mirrored without exchanging x1 and x2.

    Looks like: data.flipped_apart, where the image is mirrored and its target is not.

    Fix: exchange the left and right points as well: `points = points[FLIP_PAIRS]`.

        points[:, 0] = width - 1 - points[:, 0]
        points = points[FLIP_PAIRS]  # for example [0, 2, 1, 4, 3]: nose, shoulders, hips

    Sources: robertklee/COCO-Human-Pose PR 29, DeepLabCut PR 1805, egdels/makeacopy#89.
    """
    if not facts.mirrored or facts.evaluated < MIN_EVALUATED:
        yield NotApplicable("no sample came again with mirrored points, or no points were evaluated")
    elif facts.mirrored >= MIN_MIRRORED and facts.ordered:
        yield run.finding(
            symptom=f"{facts.mirrored} mirrored samples were read again, with left and right points not exchanged",
            evidence=[
                ("pairs of points that are always in one order in validation", facts.ordered),
                ("samples with this order reversed", facts.mirrored, 0),
            ],
        )
