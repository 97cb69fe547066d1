"""Generates text from `.colibri` files inside a hard memory budget."""

from .backend import Backend, FeedForward, Matrix, backend_names, load_backend
from .blocks import BlockSource, BlockTable
from .budget import MemoryNeeds, MemoryPlan, plan_memory
from .cache import Cache
from .config import RunConfig
from .decoder import Decoder, RoutingObserver
from .decoder_errors import ModelError
from .disk import BlockRead, DiskEngine, EngineName, IoReport, Trial
from .disk_choice import open_engine
from .disk_files import BlockFile, IoMode, OpenFile, open_blocks
from .disk_mmap import MmapEngine
from .disk_queue import QueueEngine
from .disk_threads import ThreadsEngine
from .errors import BudgetError
from .fetch import Fetch
from .generate import Piece, StopReason, generate, prompt_tokens
from .kv_cache import KvCache
from .lease import Lease
from .policy import Policy
from .policy_lru import LayerLru
from .pool import Pool, PoolReport
from .pool_plan import PoolPlan, SlotClass, equal_slots, plan_pool
from .runtime import Runtime, describe_needs, open_store, plan_run, read_model
from .sampler import Sampler, SamplingSpec
from .slots import SlotPlan, plan_slots
from .stats import LayerStats, Stats
from .store import Store
from .store_part import StorePart
from .timeline import Timeline
from .tokenizer import Tokenizer, load_tokenizer
from .weights import Weights, load_weights

__all__ = [
    "Backend",
    "BlockFile",
    "BlockRead",
    "BlockSource",
    "BlockTable",
    "BudgetError",
    "Cache",
    "Decoder",
    "DiskEngine",
    "EngineName",
    "FeedForward",
    "Fetch",
    "IoMode",
    "IoReport",
    "KvCache",
    "LayerLru",
    "LayerStats",
    "Lease",
    "Matrix",
    "MemoryNeeds",
    "MemoryPlan",
    "MmapEngine",
    "ModelError",
    "OpenFile",
    "Piece",
    "Policy",
    "Pool",
    "PoolPlan",
    "PoolReport",
    "QueueEngine",
    "RoutingObserver",
    "RunConfig",
    "Runtime",
    "Sampler",
    "SamplingSpec",
    "SlotClass",
    "SlotPlan",
    "Stats",
    "StopReason",
    "Store",
    "StorePart",
    "ThreadsEngine",
    "Timeline",
    "Tokenizer",
    "Trial",
    "Weights",
    "backend_names",
    "describe_needs",
    "equal_slots",
    "generate",
    "load_backend",
    "load_tokenizer",
    "load_weights",
    "open_blocks",
    "open_engine",
    "open_store",
    "plan_memory",
    "plan_pool",
    "plan_run",
    "plan_slots",
    "prompt_tokens",
    "read_model",
]
