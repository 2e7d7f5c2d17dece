"""The words of scikit-learn, torch, Keras and xgboost for what sparkdl calls otherwise.

This is the one table of them. `errors.did_you_mean` looks into it wherever a name is unknown: of a
Param, an argument, a key of a job file, a method. Names are compared without case and underscores.
"""

from __future__ import annotations

from collections.abc import Mapping

NAMES: Mapping[str, tuple[str, ...]] = {
    "acc": ("accuracy",),
    "accuracyscore": ("accuracy",),
    "amp": ("precision",),
    "ap": ("average_precision",),
    "areaunderpr": ("average_precision",),
    "areaunderroc": ("auroc",),
    "auc": ("auroc",),
    "augment": ("augmentation",),
    "averagingfrequency": ("averagingPeriod",),
    "balanceweights": ("weightCol",),
    "bceloss": ("bce",),
    "bcewithlogitsloss": ("bce_with_logits",),
    "binarycrossentropy": ("bce_with_logits",),
    "bs": ("batchSize",),
    "callback": ("callbacks",),
    "categoricalcrossentropy": ("cross_entropy",),
    "categories": ("labels",),
    "checkpointpath": ("checkpointDir",),
    "ckptdir": ("checkpointDir",),
    "clipgradnorm": ("gradientClipNorm",),
    "clipnorm": ("gradientClipNorm",),
    "columns": ("inputCols",),
    "criterion": ("loss",),
    "crossentropyloss": ("cross_entropy",),
    "ddp": ("allreduce",),
    "defaultrootdir": ("checkpointDir",),
    "dtype": ("precision",),
    "distributeddataparallel": ("allreduce",),
    "eta": ("learningRate",),
    "evalmetric": ("metrics",),
    "f1score": ("f1",),
    "feature": ("featuresCol",),
    "featurecols": ("inputCols",),
    "features": ("featuresCol",),
    "fsdp": ("shard",),
    "gradclip": ("gradientClipNorm",),
    "gradientclipval": ("gradientClipNorm",),
    "gradientclipping": ("gradientClipNorm",),
    "accumulategradbatches": ("gradientAccumulationSteps",),
    "accumulationsteps": ("gradientAccumulationSteps",),
    "gpus": ("gpusPerWorker",),
    "initialepoch": ("initialState",),
    "horovod": ("allreduce",),
    "inputcol": ("featuresCol",),
    "label": ("labelCol",),
    "learningratescheduler": ("scheduler",),
    "logdir": ("reportDir",),
    "loggers": ("listeners",),
    "logger": ("listeners",),
    "lossfn": ("loss",),
    "lossfunction": ("loss",),
    "lr": ("learningRate",),
    "lrscheduler": ("scheduler",),
    "mae": ("l1",),
    "maxepoch": ("epochs",),
    "maxepochs": ("epochs",),
    "maxgradnorm": ("gradientClipNorm",),
    "maxiter": ("epochs",),
    "meanabsoluteerror": ("mae", "l1"),
    "meansquarederror": ("mse",),
    "mixedprecision": ("precision",),
    "model": ("module",),
    "modelfn": ("module",),
    "momentum": ("optimizerParams",),
    "mseloss": ("mse",),
    "nepochs": ("epochs",),
    "net": ("module",),
    "network": ("module",),
    "nepoch": ("epochs",),
    "niter": ("epochs",),
    "njobs": ("numWorkers",),
    "nprocs": ("numWorkers",),
    "numproc": ("numWorkers",),
    "numprocesses": ("numWorkers",),
    "nproc": ("numWorkers",),
    "nsteps": ("maxSteps",),
    "numclasses": ("module",),
    "numdevices": ("numWorkers",),
    "numepochs": ("epochs",),
    "numepoch": ("epochs",),
    "numgpus": ("gpusPerWorker",),
    "numround": ("epochs",),
    "numsteps": ("maxSteps",),
    "onbatchend": ("on_step_end",),
    "onepochbegin": ("on_train_begin",),
    "onepochstart": ("on_train_begin",),
    "onfitend": ("on_train_end",),
    "onfitstart": ("on_train_begin",),
    "ontestend": ("on_evaluation_end",),
    "ontrainbatchend": ("on_step_end",),
    "ontrainepochend": ("on_epoch_end",),
    "ontrainstart": ("on_train_begin",),
    "onvalidationend": ("on_evaluation_end",),
    "onvalidationepochend": ("on_evaluation_end",),
    "optim": ("optimizer",),
    "optimizerkwargs": ("optimizerParams",),
    "optimparams": ("optimizerParams",),
    "outputcol": ("predictionCol",),
    "parallel": ("parallelism",),
    "perdevicetrainbatchsize": ("batchSize",),
    "predictions": ("predictionCol",),
    "randomseed": ("seed",),
    "randomstate": ("seed",),
    "prauc": ("average_precision",),
    "r2score": ("r2",),
    "rate": ("learningRate",),
    "rocauc": ("auroc",),
    "rocaucscore": ("auroc",),
    "sampleweight": ("weightCol",),
    "sampleweightcol": ("weightCol",),
    "sparsecategoricalcrossentropy": ("cross_entropy",),
    "steps": ("maxSteps",),
    "strategy": ("syncStrategy",),
    "syncevery": ("averagingPeriod",),
    "target": ("labelCol",),
    "targetcol": ("labelCol",),
    "tensorparallel": ("tensor",),
    "tp": ("tensor",),
    "pp": ("pipeline",),
    "trainbatchsize": ("batchSize",),
    "useamp": ("precision",),
    "usegpu": ("device",),
    "validationdata": ("validationIndicatorCol",),
    "validationset": ("validationIndicatorCol",),
    "validationsplit": ("validationFraction",),
    "validsize": ("validationFraction",),
    "valsplit": ("validationFraction",),
    "warmstart": ("initialState",),
    "weightdecay": ("optimizerParams",),
    "weights": ("initialWeights",),
    "workers": ("numWorkers",),
    "worldsize": ("numWorkers",),
    "y": ("labelCol",),
    "ycol": ("labelCol",),
    "x": ("featuresCol",),
    "xcol": ("featuresCol",),
}
"""Name elsewhere -> those of ours that mean it; where one is known, it is suggested."""

METHODS: Mapping[str, tuple[str, str]] = {
    "compute": ("evaluate(df)", ", which gives loss and metrics"),
    "cpu": ("setDevice('cpu')", ""),
    "cuda": ("setDevice('cuda')", ", or leave 'auto', which takes the GPU that Spark assigns"),
    "decisionfunction": ("transform(df)", ", which adds the column rawPredictionCol"),
    "eval": ("transform(df)", ", which predicts in eval mode by itself"),
    "evaluate": ("evaluate(df)", ""),
    "explain": ("explain(df)", ""),
    "fit": ("fit(df)", ""),
    "fitgenerator": ("fit(df)", ""),
    "fitpredict": ("fit(df).transform(df)", ""),
    "fittransform": ("fit(df).transform(df)", ""),
    "forward": ("transform(df)", ", which adds the column of predictions"),
    "history": ("summary", ".history"),
    "load": ("load(path)", ""),
    "loadmodel": ("load(path)", ""),
    "loadweights": ("load(path)", ""),
    "partialfit": ("fit(df)", " with initialState=model, which goes on from a fitted model"),
    "predict": ("transform(df)", ", which adds the column of predictions"),
    "predictlogproba": ("transform(df)", ", which adds the column probabilityCol"),
    "predictonbatch": ("transform(df)", ", which adds the column of predictions"),
    "predictproba": ("transform(df)", ", which adds the column probabilityCol"),
    "predictprobability": ("transform(df)", ", which adds the column probabilityCol"),
    "savemodel": ("save(path)", ""),
    "saveweights": ("save(path)", ", and 'sparkdl export' for the weights alone"),
    "score": ("evaluate(df)", ", or scores(df) for the loss of each row"),
    "scores": ("scores(df)", ""),
    "scoresamples": ("scores(df)", ", which gives the loss of each row"),
    "summary": ("summary", ""),
    "test": ("evaluate(df)", ", which gives loss and metrics"),
    "to": ("setDevice('cuda')", ", or leave 'auto', which takes the GPU that Spark assigns"),
    "train": ("fit(df)", ""),
    "transform": ("transform(df)", ""),
    "validate": ("evaluate(df)", ", which gives loss and metrics"),
}
"""Method elsewhere -> what to call in place of it, and more words about that."""


def as_method(name: str) -> str:
    """Say whose method a name is, where a function of the package is looked for; empty: none's."""
    call, more = METHODS.get(plain(name), ("", ""))
    owner = "TorchClassifier(module=Net)"
    if call.startswith("load("):
        owner = "TorchClassifierModel"
    elif not call.startswith(("fit(", "explain(")):
        owner += ".fit(df)"
    return f"; use {owner}.{call}{more}" if call else ""


def plain(name: object) -> str:
    """A name without case and underscores, by which names are compared."""
    return str(name).lower().replace("_", "")


def same(name: object, known: Mapping[str, str]) -> str | None:
    """The one of ``known``, by its plain form, that a name is otherwise written, or that it means.

    None: there is no such one.
    """
    wanted = plain(name)
    found = (known.get(plain(ours)) for ours in (wanted, *NAMES.get(wanted, ())))
    return next((one for one in found if one is not None), None)
