"""What docstrings and signatures need to be read as documentation."""

import inspect
import re

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.util.inspect import stringify_signature

# The union that `jaxtyping.Float[ArrayLike, "n d"]` stands for, and JAX's own class.
LIKE = re.compile(
    r"~?(?:jaxtyping\.)?(\w+)\[~?jaxlib\._jax\.Array, ('[^']*')\] \| "
    r"~?(?:jaxtyping\.)?\1\[~?(?:numpy\.)?ndarray, \2\]"
    r"(?: \| ~?(?:numpy\.)?(?:bool|number|int|float|complex))*"
)
# a function or class as a default value: its name alone
DEFAULT = re.compile(
    r"<(?:function|class) '?([\w.]+?)(?:\.<locals>\.\w+)?'?(?: at \w+)?>"
)
LIBRARIES = r"jaxmem|jax|jnp|optax|flax|nnx|linen"
NAME = re.compile(rf"((?:{LIBRARIES})(?:\.[A-Za-z]\w*)+)(?:\(.*\))?$", re.DOTALL)


def readable(app, what, name, obj, options, lines):
    """Two forms of the docstrings that RST would read as something else.

    A letter right after a closing backtick, as in `array`s, ends no RST markup; a star
    in the shape of an attribute's type begins one.
    """
    lines[:] = [re.sub(r"(?<=\w`)(?=s\b)", r"\\ ", line) for line in lines]
    lines[:] = [re.sub(r"^(:vartype \w+:) (.*\*.*)$", r"\1 ``\2``", x) for x in lines]


def signature(app, what, name, obj, options, args, returned):
    """Functions by their names; of nnx, whose metaclass hides it, of `__init__`."""
    if what == "class" and type(obj) is not type and "nnx" in name:
        whole = inspect.signature(obj.__init__)
        parameters = list(whole.parameters.values())[1:]  # without self
        whole = whole.replace(parameters=parameters)
        args = stringify_signature(whole, show_annotation=False)
    return (DEFAULT.sub(r"\1", args), returned) if args else None  # of a property


def short_types(app, domain, kind, content):
    """`Float[ArrayLike, "n d"]` instead of the union that it is."""
    recorded = getattr(app.env.current_document, "autodoc_annotations", {})
    for types in recorded.values():
        for name, text in types.items():
            text = LIKE.sub(r"\1[ArrayLike, \2]", text)
            types[name] = re.sub(r"~?jaxlib\._jax\.Array", "jax.Array", text)


def link_code(app, doctree):
    """Code in the prose that is a public name, such as `jaxmem.schedule`, is a link."""
    for code in list(doctree.findall(nodes.literal)):
        found = NAME.match(code.astext())
        if found is None or isinstance(code.parent, nodes.reference | pending_xref):
            continue
        link = pending_xref(
            "",
            refdomain="py",
            reftype="obj",
            reftarget=found[1],
            refexplicit=True,
            refwarn=False,
            refdoc=app.env.current_document.docname,
        )
        code.replace_self(link)
        link += code
