"""Images and signals of ten classes, from files of this machine or from packages of the extra `data`."""

from .fashion_mnist import FashionMNIST as FashionMNIST
from .mnist_1d import MNIST1D as MNIST1D
from .mnist_5k import MNIST5K as MNIST5K
