from trainwright.doctor import Every, NotApplicable, Results, RunContext, check
from trainwright.doctor.facts.data import BatchFacts


@check(points_at=("dataset", "loader"), stage="input", confidence=0.9, since_step=1)
def image_axes_reordered(run: RunContext, exams: Every[BatchFacts]) -> Results:
    """The axes of the images are exchanged with `reshape` instead of `permute`, so pixels are in the wrong places.

    Why it matters: shapes are right and the model learns something, but no picture is recognizable.

    How it is detected: the differences between neighbouring pixels of images (batch, channel, height, width) become
    smaller if the `reshape` is undone, vertically and in total, by more than six standard errors, in every examined
    batch.

    Exceptions: images without 2 to 4 channels, with fewer than 8 pixels in a row, or fewer than 8 in a batch.

    Usual cause: `images.reshape(-1, 3, 32, 32)` of arrays (batch, height, width, channel), as NumPy, PIL, OpenCV and
    environments return them; or `.reshape(-1, 32, 32, 3)` of rows that store one channel after the other, as CIFAR.

    Looks like: model.view_reorders_axes, where the reshape is in the model.

    Fix: `images.reshape(-1, 32, 32, 3).permute(0, 3, 1, 2)`. Display a few images that the model gets.

    Sources: chongyi-zheng/stable_contrastive_rl#3, BonnBytes/PyTorch-FWD#16, zamanzadeh/CARLA#16.
    """
    found = {facts.scrambled for _, facts in exams}
    if not any(len(each.shape) == 4 for _, facts in exams for each in facts.inputs[:1]):
        yield NotApplicable("the input is no batch of images")
    elif len(found) == 1 and (order := found.pop()):
        yield run.finding(
            symptom=f"the images are smooth only if their memory is read as {order}: a reshape has moved their pixels",
            evidence=[("order of the axes in memory", order, "the order of the shape")],
        )
