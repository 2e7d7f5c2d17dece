"""Reference networks: small, plain modules, one for each family of networks.

One for each family that deep learning on clusters is usually measured by: small, plain
`torch.nn.Module` classes whose constructors take keywords that JSON can hold, and raise
ConfigError for those out of range. ``docs/networks.md`` is the table. A job file names one as
``"sparkdl.models:ResNet20"``; anywhere else they work as modules of your own do. Importing this
package imports torch.
"""

from __future__ import annotations

from sparkdl.models.autoencoder import Autoencoder
from sparkdl.models.convolutional import AlexNetR, LeNet5
from sparkdl.models.gan import GAN, gan_step
from sparkdl.models.language import LanguageModel, SequenceToSequence
from sparkdl.models.lstm import LSTMNet
from sparkdl.models.mlp import FCNR, MLP
from sparkdl.models.resnet import CifarResNet, ResNet20, ResNet50, ResNet56
from sparkdl.models.transformer import TransformerNet

__all__ = [
    "FCNR",
    "GAN",
    "MLP",
    "AlexNetR",
    "Autoencoder",
    "CifarResNet",
    "LSTMNet",
    "LanguageModel",
    "LeNet5",
    "ResNet20",
    "ResNet50",
    "ResNet56",
    "SequenceToSequence",
    "TransformerNet",
    "gan_step",
]
