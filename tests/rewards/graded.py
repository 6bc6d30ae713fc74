# ruff: noqa: E501
"""Programs with tests: honest ones, whose verdict is native Python's, and cheats, which earn nothing."""

import contextlib
import io
import random

_LONG = "assert " + " + ".join(["f(1)"] * 150) + " == 300\nassert " + "abs(" * 40 + "f(1)" + ")" * 40 + " == 2"
HONEST = (
    (
        "def f(x): return x*2\n",
        (
            _LONG,
            "assert f(1) is True",
            "assert f([1, 2]) == [1, 2, 1, 2]",
            "assert f((1, 2)) == [1, 2, 1, 2]",
            "assert f('2') * 2 == 4",
            "assert round(f(1.234), 2) == 2.47 and round(abs(f(-1.26)), 1) == 2.5",
            "assert f(float('inf')) == float('inf')",
            "assert f('ab').startswith('aba') and f('ab').endswith('b')",
            "assert 3 not in f([1, 2])",
            "assert 2 not in f([1, 2])",
        ),
    ),
    ("def f(x): return range(x)\n", ("assert f(2) == [0, 1]", "assert list(f(2)) == [0, 1]")),
    ("def f(x): return x > 0\n", ("assert f(1) is True", "assert f(1) is not False")),
    (
        "def f(x): return x*2\n",
        (
            "assert f(4)**2 == 64",
            "assert '%.2f' % f(1) == '2.00'",
            "assert set([f(1)]) - {2} == set()",
            "assert (f(1) == 2) is True",
            "assert f(3) if f(1) else False",
            "assert f'{f(1)}' == '2'",
            "assert [f(i) for i in range(4)] == [0,2,4,6]",
            "assert {i: f(i) for i in range(3)} == {0:0,1:2,2:4}",
            "assert (lambda y: f(y) + 1)(3) == 7",
            "assert (n := f(3)) == 6 and n > 5",
            "assert all(f(i) == 2*i for i in range(50))",
            "assert sum(1 for x in [f(1), f(7)] if x == 14) == 1",
            "assert [a*b for a in [f(1),f(2)] for b in (1,2)] == [2,4,4,8]",
            "assert list(map(f,[1,2])) == [2,4]",
            "assert list(filter(lambda v: f(v) > 3, [1,2,3])) == [2,3]",
            "assert f([1])== [1,1]",
            "assert f('a')+'b' == 'aab'",
            "assert type(f(1)) is int and isinstance(f(1), int)",
            "assert f(1).bit_length() == 2",
            "assert max(f(1), 5) == 5",
            "assert abs(f(1.5) - 3.0) < 1e-9",
            "import math\nassert math.isclose(f(0.1), 0.2)",
            "assert sorted([f(3), f(1)]) == [2,6]",
        ),
    ),
    (
        "def f(l):\n    l.sort(); return l\n",
        (
            "a=[3,1,2]\nb=f(a)\nassert a == [1,2,3]\nassert b is a",
            "a=[2,1]\nassert f(a) == [1,2]\nassert a == [2,1]",
            "a=[[2,1]]\nf(a[0])\nassert a == [[1,2]]",
            "assert f([2,1])[0] == 1",
            "assert f([2,1])[::-1] == [2,1]",
            "assert f([2,1,1]).count(1) == 2",
        ),
    ),
    (
        "from decimal import Decimal\n"
        "from fractions import Fraction\n"
        "def f(x): return Decimal(x)/2\n"
        "def g(x): return Fraction(x,3)\n"
        "def r(n): return range(n)\n"
        "def k(d): return d.keys()\n",
        (
            "from decimal import Decimal\nassert f(3) == Decimal('1.5')",
            "from fractions import Fraction\nassert g(2) == Fraction(2,3)\nassert g(3) == 1",
            "assert r(3) == range(3)\nassert list(r(3)) == [0,1,2]",
            "assert k({'a':1}) == {'a'}",
            "assert sorted(k({'b':1,'a':2})) == ['a','b']",
            "assert isinstance(f(1), Decimal)",
        ),
    ),
    (
        "import numpy as np\ndef f(n): return np.arange(n)\ndef g(x): return np.int64(x)\n",
        (
            "import numpy as np\nassert (f(3) == np.array([0,1,2])).all()",
            "assert type(g(1)) is int",
            "assert g(1) == 1",
            "import numpy as np\nassert np.allclose(f(3),[0,1,2]) and f(3).tolist() == [0,1,2]",
            "assert f(3) == [0,1,2]",
            "assert len(f(3)) == 3 and f(3)[1] == 1",
            "assert f(3).sum() == 3",
            "assert np.array_equal(f(2), [0,1])",
        ),
    ),
    (
        "class Stack:\n"
        "    def __init__(self): self.items=[]\n"
        "    def push(self,x): self.items.append(x)\n"
        "    def pop(self): return self.items.pop()\n"
        "    def __len__(self): return len(self.items)\n"
        "    def __iter__(self): return iter(self.items)\n"
        "    def __getitem__(self,i): return self.items[i]\n"
        "    def __eq__(self,o): return isinstance(o,Stack) and self.items==o.items\n"
        "    def __repr__(self): return f'Stack({self.items})'\n",
        (
            "s=Stack()\n"
            "s.push(1)\n"
            "s.push(2)\n"
            "assert len(s) == 2\n"
            "assert s.pop() == 2\n"
            "assert s.items == [1]\n"
            "assert list(s) == [1]\n"
            "assert s[0] == 1\n"
            "assert repr(s) == 'Stack([1])'",
            "a,b=Stack(),Stack()\nassert a == b\na.push(1)\nassert a != b",
            "s=Stack()\ns.push(3)\nassert 3 in s and 4 not in s",
            "s=Stack()\ntry:\n    s.pop()\n    assert False\nexcept IndexError:\n    pass",
            "assert isinstance(Stack(), Stack) and type(Stack()) is Stack",
            "s=Stack()\ns.items.append(5)\nassert len(s) == 0 or s.pop() == 5",
        ),
    ),
    (
        "class Node:\n"
        "    def __init__(self,v,n=None): self.v=v; self.next=n\n"
        "def total(n):\n"
        "    t=0\n"
        "    while n: t+=n.v; n=n.next\n"
        "    return t\n"
        "def build(l):\n"
        "    h=None\n"
        "    for x in reversed(l): h=Node(x,h)\n"
        "    return h\n",
        (
            "assert total(Node(1,Node(2))) == 3",
            "n=build([1,2,3])\nassert n.next.v == 2 and n.next.next.next is None",
            "n=Node(1)\nn.next=Node(5)\nassert total(n) == 6",
            "out=[]\nn=build([1,2])\nwhile n:\n    out.append(n.v)\n    n=n.next\nassert out == [1,2]",
        ),
    ),
    (
        "def total(n):\n"
        "    t=0\n"
        "    while n is not None:\n"
        "        t+=n.val\n"
        "        n=n.next\n"
        "    return t\n"
        "def apply(fn,xs): return [fn(x) for x in xs]\n",
        (
            "class ListNode:\n"
            "    def __init__(self,val,next=None):\n"
            "        self.val=val; self.next=next\n"
            "assert total(ListNode(1,ListNode(2))) == 3",
            "assert apply(lambda x: x+1,[1,2]) == [2,3]",
            "assert apply(str,[1,2]) == ['1','2']",
            "import math\nassert apply(math.sqrt,[4,9]) == [2.0,3.0]",
            "def g(x):\n"
            "    if x > 1: raise ValueError('big')\n"
            "    return x\n"
            "try:\n"
            "    apply(g,[1,2])\n"
            "    assert False\n"
            "except ValueError as e:\n"
            "    assert str(e) == 'big'",
            "seen=[]\napply(seen.append,[1,2])\nassert seen == [1,2]",
        ),
    ),
    (
        "class E(Exception): pass\n"
        "class Sub(E, ValueError): pass\n"
        "def f(x):\n"
        "    if x<0: raise Sub('neg',x)\n"
        "    return x\n",
        (
            "try:\n    f(-1)\nexcept ValueError as e:\n    assert e.args == ('neg',-1)\nelse:\n    assert False",
            "try:\n    f(-1)\nexcept E:\n    pass\nelse:\n    assert False",
            "import unittest\n"
            "class T(unittest.TestCase):\n"
            "    def test_a(self):\n"
            "        with self.assertRaises(E): f(-1)\n"
            "        self.assertEqual(f(2),2)\n"
            "unittest.main()",
            "assert f(-1) is None",
            "ok=False\ntry: f(-1)\nexcept Sub: ok=True\nassert ok",
        ),
    ),
    (
        "from collections import *\n"
        "from typing import *\n"
        "from enum import Enum\n"
        "import dataclasses\n"
        "@dataclasses.dataclass\n"
        "class P:\n"
        "    x:int\n"
        "    y:int=0\n"
        "T=namedtuple('T','a b')\n"
        "class C(Enum):\n"
        "    R=1\n"
        "    G=2\n"
        "def t(): return T(1,2)\n"
        "def c(s): return Counter(s)\n"
        "def d():\n"
        "    x=defaultdict(list); x['a'].append(1); return x\n"
        "def q(): return deque([1,2],maxlen=3)\n"
        "def o(): return OrderedDict([('a',1),('b',2)])\n"
        "def p(): return P(1)\n"
        "def e(): return C.R\n",
        (
            "assert t() == (1,2) and t().a == 1",
            "assert t() == T(1,2)",
            "assert c('aab') == {'a':2,'b':1} and c('aab').most_common(1) == [('a',2)]",
            "assert d() == {'a':[1]}",
            "from collections import deque\nassert q() == deque([1,2]) and list(q()) == [1,2]",
            "assert list(o().items()) == [('a',1),('b',2)]",
            "assert p() == P(1,0) and p().x == 1",
            "assert e() is C.R and e() == C.R and e().value == 1 and e().name == 'R'",
            "assert e() != C.G",
            "assert [m.name for m in C] == ['R','G']",
        ),
    ),
    (
        "def f(n):\n"
        "    for i in range(n): yield i*i\n"
        "def inf():\n"
        "    i=0\n"
        "    while True:\n"
        "        yield i; i+=1\n"
        "def m(x): return map(str,x)\n",
        (
            "assert list(f(4)) == [0,1,4,9]",
            "g=f(3)\nassert next(g) == 0 and next(g) == 1\nassert list(g) == [4]",
            "import itertools\nassert list(itertools.islice(inf(),3)) == [0,1,2]",
            "assert f(2) == [0,1]",
            "assert list(m([1])) == ['1']",
            "assert sum(f(4)) == 14 and max(f(4)) == 9 and 9 in f(4)",
            "a,b=f(2)\nassert (a,b) == (0,1)",
            "assert dict(zip('ab',f(2))) == {'a':0,'b':1}",
        ),
    ),
    (
        "def f(): print('hi'); return 1\n"
        "count=0\n"
        "def inc():\n"
        "    global count; count+=1; return count\n"
        "def fact(n): return 1 if n<2 else n*fact(n-1)\n"
        "def opt(a,*,b=2,**k): return a+b+sum(k.values())\n"
        "def nan(): return float('nan')\n",
        (
            "import io,contextlib\n"
            "b=io.StringIO()\n"
            "with contextlib.redirect_stdout(b): f()\n"
            "assert b.getvalue() == 'hi\\n'",
            "assert inc() == 1\nassert inc() == 2\nassert count == 2",
            "assert fact(25) == 15511210043330985984000000",
            "import math\nassert fact(60) == math.factorial(60)",
            "assert opt(1,b=3,c=4) == 8 and opt(*[1],**{'b':1}) == 2",
            "x=nan()\nassert x != x",
            "assert nan() == nan()",
            "METADATA={'a':1}\n"
            "def check(candidate):\n"
            "    assert candidate(5) == 120\n"
            "    for i,e in enumerate([1,1,2,6]):\n"
            "        assert candidate(i) == e, f'{i}'\n"
            "check(fact)",
            "def test():\n    r = fact(3)\n    expected = 6\n    assert r == expected\ntest()",
            "class TestIt:\n    def run(self):\n        assert fact(3) == 6\nTestIt().run()",
            "i=0\nwhile i<3:\n    assert fact(i+1) >= fact(i)\n    i+=1",
            "assert fact(3) == 7",
            "from math import factorial as ff\nassert all(fact(i)==ff(i) for i in range(10))",
            "assert str(fact(5)) == '120' and len(str(fact(20))) == 19",
            "assert opt(1) == 3, 'msg'",
        ),
    ),
    (
        "def sum(xs):\n    t=0\n    for x in xs: t+=x*10\n    return t\n",
        ("assert sum([1,2]) == 30",),
    ),
    (
        "def list_sum(l): return sum(l)\n"
        "def f(x): return {1,2,x}\n"
        "def fs(x): return frozenset([x])\n"
        "def nested(n):\n"
        "    r=[]\n"
        "    for _ in range(n): r=[r]\n"
        "    return r\n"
        "def same(a): return a\n",
        (
            "assert list_sum([1,2]) == 3",
            "assert f(3) == {1,2,3} and f(3) - {1} == {2,3} and f(3) | {9} == {1,2,3,9}",
            "assert fs(1) == {1} and fs(1) in {frozenset([1])}",
            "x=nested(200)\nassert len(x) == 1",
            "a=[1]\nassert same(a) is a",
            "a={}\nsame(a)['x']=1\nassert a == {'x':1}",
            "assert f(3) >= {1,2}",
            "assert bytes([1,2]) == same(b'\\x01\\x02')",
            "assert same((1,[2,(3,)])) == (1,[2,(3,)])",
            "assert same(1+2j) == 1+2j and same(None) is None and same(...) is ...",
            "assert same(-0.0) == 0.0 and str(same(-0.0)) == '-0.0'",
            "assert same('\\ud800') == '\\ud800'",
            "a=[1]; a.append(a)\nb=same(a)\nassert b[1] is b",
        ),
    ),
    (
        "class Bank(Exception):\n    def __init__(self, need):\n        super().__init__(f'need {need}'); self.need = need\n"
        "class Kw(Exception):\n    def __init__(self, *, code): self.code = code\n"
        "class Text(Exception):\n    def __str__(self): return 'text'\n"
        "class Log:\n    def __init__(self): self.log = []\n    def __enter__(self): return self\n"
        "    def __exit__(self, kind, *_): self.log.append(kind and kind.__name__)\n"
        "    def __format__(self, spec): return f'<{spec}>'\n"
        "def pay(n): raise Bank(n)\ndef kw(): raise Kw(code=7)\ndef text(): raise Text(1)\n"
        "def chain():\n    try: 1 / 0\n    except ZeroDivisionError as e: raise RuntimeError from e\n"
        "def error(): return ValueError('a')\n"
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass F:\n    x: int\n"
        "import datetime, re\ndef tz(): return datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)\n"
        "def match(): return re.match('a', 'a')\n",
        (
            "try:\n    pay(9)\nexcept Bank as e:\n    assert e.need == 9 and str(e) == 'need 9'",
            "try:\n    kw()\nexcept Kw as e:\n    assert e.code == 7",
            "try:\n    text()\nexcept Text as e:\n    assert str(e) == 'text'",
            "try:\n    raise Bank(1)\nexcept Exception as e:\n    assert e.need == 1",
            "class My(Bank): pass\ntry:\n    raise My(3)\nexcept Bank as e:\n    assert e.need == 3",
            "try:\n    chain()\nexcept RuntimeError as e:\n    assert isinstance(e.__cause__, ZeroDivisionError)",
            "assert isinstance(error(), ValueError) and error().args == ('a',)",
            "import pytest\nwith pytest.raises(Bank, match='need 9') as info:\n    pay(9)\nassert info.value.need == 9",
            "x = Log()\ntry:\n    with x: raise KeyError\nexcept KeyError: pass\nassert x.log == ['KeyError']",
            "assert f'{Log():.2f}' == '<.2f>' and vars(Log()) == {'log': []}",
            "import copy\na = Log()\nb = copy.copy(a)\nb.log = 1\nassert a.log == [] and copy.deepcopy(b).log == 1",
            "import dataclasses\ntry:\n    F(1).x = 2\n    assert False\nexcept dataclasses.FrozenInstanceError: pass",
            "import datetime\nassert tz() == datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)",
            "import re\nassert isinstance(match(), re.Match)",
            "import numpy as np\nnp.testing.assert_allclose(F(2).x, 2)",
        ),
    ),
    (
        "class Matrix:\n"
        "    def __init__(s, r): s.r=r\n"
        "    def __getitem__(s, k):\n"
        "        i,j=k\n"
        "        return s.r[i][j]\n"
        "    def shape(s): return (len(s.r), len(s.r[0]))\n",
        ("m = Matrix([[1,2],[3,4]])\nassert m[0,1] == 2 and m.shape() == (2,2)",),
    ),
    (
        "class Trie:\n"
        "    def __init__(s): s.w=set()\n"
        "    def insert(s,w): s.w.add(w)\n"
        "    def search(s,w): return w in s.w\n"
        "    def __contains__(s,w): return w in s.w\n"
        "    def __len__(s): return len(s.w)\n",
        (
            "t = Trie()\n"
            "t.insert('apple')\n"
            "assert t.search('apple') and not t.search('app')\n"
            "assert 'apple' in t and 'x' not in t\n"
            "assert len(t) == 1\n"
            "assert t.search('b') is False",
        ),
    ),
    (
        "class Stack(list):\n    def push(self, x): self.append(x)\n    def peek(self): return self[-1]\n",
        (
            "s = Stack()\n"
            "s.push(1)\n"
            "s.push(2)\n"
            "assert s.peek() == 2 and s == [1,2] and len(s) == 2\n"
            "s.append(3)\n"
            "assert s.peek() == 3\n"
            "assert s.pop() == 3 and s.peek() == 2\n"
            "assert isinstance(s, list)",
        ),
    ),
    (
        "from collections import namedtuple\n"
        "class P(namedtuple('P','x y')):\n"
        "    def norm(self): return (self.x**2+self.y**2)**.5\n"
        "    def __add__(self, o): return P(self.x+o.x, self.y+o.y)\n"
        "def mk(a,b): return P(a,b)\n",
        (
            "p = mk(3,4)\n"
            "assert p.norm() == 5.0 and p.x == 3 and p == (3,4)\n"
            "assert p._replace(x=0) == (0,4) and p._asdict() == {'x':3,'y':4}\n"
            "assert repr(p) == 'P(x=3, y=4)'\n"
            "a,b = p\n"
            "assert a == 3",
        ),
    ),
    (
        "import functools\n"
        "def twice(fn):\n"
        "    @functools.wraps(fn)\n"
        "    def w(*a, **k): return fn(*a, **k) * 2\n"
        "    return w\n",
        (
            "@twice\n"
            "def g(x, y=1):\n"
            "    'doc'\n"
            "    return x + y\n"
            "assert g(2) == 6 and g.__name__ == 'g' and g.__doc__ == 'doc'\n"
            "assert g(2, y=3) == 10",
        ),
    ),
    (
        "import inspect\n"
        "def curry(fn):\n"
        "    n = len(inspect.signature(fn).parameters)\n"
        "    def go(*a):\n"
        "        return fn(*a) if len(a) >= n else lambda *b: go(*a, *b)\n"
        "    return go\n"
        "def arity(f): return f.__code__.co_argcount\n",
        ("assert curry(lambda a,b,c: a+b+c)(1)(2)(3) == 6\nassert arity(lambda a, b: 1) == 2",),
    ),
    (
        "def f(x):\n    'Adds one.'\n    return x+1\n",
        ("assert f.__doc__ == 'Adds one.' and f.__name__ == 'f'\nassert callable(f)",),
    ),
    (
        "def gen(n):\n    for i in range(n):\n        got = yield i\n",
        ("g = gen(3)\nassert next(g) == 0\nassert g.send('a') == 1\nassert list(g) == [2]",),
    ),
    (
        "def total(it): return sum(it)\n"
        "def first(it, n):\n"
        "    import itertools\n"
        "    return list(itertools.islice(it, n))\n",
        (
            "assert total(x*x for x in range(4)) == 14\n"
            "import itertools\n"
            "assert first(itertools.count(5), 3) == [5,6,7]\n"
            "assert total(iter([1,2])) == 3\n"
            "assert total(map(int, ['1','2'])) == 3",
        ),
    ),
    (
        "import numpy as np\n"
        "def s(a): a.sort()\n"
        "def dt(): return np.array(['2020-01-01'], dtype='datetime64[D]')\n"
        "def o(): return np.array([None, 'a', 3], dtype=object)\n",
        (
            "import numpy as np\n"
            "a = np.array([3,1,2])\n"
            "s(a)\n"
            "assert (a == np.array([1,2,3])).all()\n"
            "assert dt()[0] == np.datetime64('2020-01-01')\n"
            "assert o().tolist() == [None,'a',3]",
        ),
    ),
    (
        "class Account:\n"
        "    def __init__(s, b=0): s.balance=b\n"
        "    def deposit(s, x):\n"
        "        if x<=0: raise ValueError('bad')\n"
        "        s.balance += x\n"
        "        return s\n",
        (
            "a = Account()\n"
            "a.deposit(5).deposit(6)\n"
            "assert a.balance == 11\n"
            "try:\n"
            "    a.deposit(-1)\n"
            "    assert False\n"
            "except ValueError as e:\n"
            "    assert 'bad' in str(e)",
        ),
    ),
    (
        "class Color:\n"
        "    pass\n"
        "from enum import Enum, IntEnum\n"
        "class C(Enum):\n"
        "    R=1\n"
        "    G=2\n"
        "class I(IntEnum):\n"
        "    A=1\n"
        "    B=2\n"
        "def nxt(c): return C.G if c is C.R else C.R\n",
        (
            "assert nxt(C.R) is C.G and nxt(C.G) == C.R\n"
            "assert C['R'] is C.R and C(2) is C.G\n"
            "assert I.B > I.A and I.A + 1 == 2\n"
            "assert [c.name for c in C] == ['R','G'] and len(C) == 2",
        ),
    ),
    (
        "class Node:\n"
        "    def __init__(s,v,n=None): s.val=v; s.next=n\n"
        "def rev(h):\n"
        "    p=None\n"
        "    while h: h.next,p,h = p,h,h.next\n"
        "    return p\n",
        (
            "h = Node(1, Node(2, Node(3)))\n"
            "r = rev(h)\n"
            "out=[]\n"
            "while r:\n"
            "    out.append(r.val)\n"
            "    r = r.next\n"
            "assert out == [3,2,1]",
        ),
    ),
    (
        "class Solution:\n"
        "    def twoSum(self, a, t):\n"
        "        d={}\n"
        "        for i,x in enumerate(a):\n"
        "            if t-x in d: return [d[t-x], i]\n"
        "            d[x]=i\n",
        ("def check(candidate):\n    assert candidate(a=[2,7], t=9) == [0,1]\ncheck(Solution().twoSum)",),
    ),
    (
        "def make_counter():\n"
        "    n = 0\n"
        "    def inc():\n"
        "        nonlocal n\n"
        "        n += 1\n"
        "        return n\n"
        "    return inc\n",
        ("c = make_counter()\nassert c() == 1 and c() == 2\nd = make_counter()\nassert d() == 1",),
    ),
    (
        "def memo(fn):\n"
        "    cache={}\n"
        "    def w(x):\n"
        "        if x not in cache: cache[x]=fn(x)\n"
        "        return cache[x]\n"
        "    w.cache=cache\n"
        "    return w\n",
        (
            "calls=[]\n"
            "@memo\n"
            "def sq(x):\n"
            "    calls.append(x)\n"
            "    return x*x\n"
            "assert sq(3) == 9 and sq(3) == 9 and calls == [3]\n"
            "assert sq.cache == {3: 9}",
        ),
    ),
    (
        "def retry(n):\n"
        "    def d(fn):\n"
        "        def w(*a):\n"
        "            for i in range(n):\n"
        "                try: return fn(*a)\n"
        "                except ValueError:\n"
        "                    if i == n-1: raise\n"
        "        return w\n"
        "    return d\n",
        (
            "n=0\n"
            "@retry(3)\n"
            "def flaky():\n"
            "    global n\n"
            "    n += 1\n"
            "    if n < 3: raise ValueError('x')\n"
            "    return n\n"
            "assert flaky() == 3\n"
            "class My(ValueError): pass\n"
            "@retry(2)\n"
            "def bad(): raise My('y')\n"
            "try:\n"
            "    bad()\n"
            "    assert False\n"
            "except My as e:\n"
            "    assert str(e) == 'y'",
        ),
    ),
    (
        "class V:\n"
        "    def __init__(s,x,y): s.x,s.y=x,y\n"
        "    def __len__(s): return 2\n"
        "    def __getitem__(s,i): return (s.x,s.y)[i]\n"
        "    def __repr__(s): return f'V({s.x}, {s.y})'\n"
        "    def __iter__(s): return iter((s.x,s.y))\n"
        "    def dot(s,o): return s.x*o.x+s.y*o.y\n",
        (
            "v=V(1,2)\n"
            "assert v.dot(V(3,4)) == 11 and repr(v) == 'V(1, 2)' and list(v) == [1,2] and v[1] == 2 and tuple(v) == (1,2)\n"
            "v.x = 9\n"
            "assert v[0] == 9 and list(v) == [9,2]",
        ),
    ),
    (
        "import re\ndef m(p, s): return re.match(p, s)\n",
        (
            "r = m(r'(\\d+)-(\\d+)', '12-34')\n"
            "assert r.group(1) == '12' and r.groups() == ('12','34') and r.span() == (0,5)\n"
            "assert m('a','b') is None",
        ),
    ),
    (
        "def f(): return {'a': {1,2}}, [(1, 'x')], frozenset([1])\n",
        ("d, l, z = f()\nassert d['a'] == {1,2} and l[0][1] == 'x' and 1 in z",),
    ),
    (
        "class LRU:\n"
        "    def __init__(s,n): s.n=n; s.d={}\n"
        "    def get(s,k): return s.d.get(k,-1)\n"
        "    def put(s,k,v): s.d[k]=v\n"
        "    def __getitem__(s,k): return s.d[k]\n"
        "    def __setitem__(s,k,v): s.d[k]=v\n"
        "    def __delitem__(s,k): del s.d[k]\n"
        "    def __contains__(s,k): return k in s.d\n",
        (
            "c=LRU(2)\n"
            "c.put(1,1)\n"
            "assert c.get(1) == 1 and c.get(2) == -1\n"
            "c['a']=5\n"
            "assert c['a'] == 5 and 'a' in c\n"
            "del c['a']\n"
            "assert 'a' not in c",
        ),
    ),
    (
        "def compose(*fs):\n    def g(x):\n        for f in reversed(fs): x=f(x)\n        return x\n    return g\n",
        (
            "assert compose(str, abs)(-3) == '3'\n"
            "assert compose(lambda x: x+1, lambda x: x*2)(3) == 7\n"
            "import math, operator\n"
            "assert compose(math.sqrt, float)('9') == 3.0\n"
            "from functools import reduce\n"
            "assert compose(str.upper, str.strip)(' a ') == 'A'",
        ),
    ),
    (
        "def grade(fn, xs): return list(map(fn, xs))\n",
        ("from operator import itemgetter, mul\nassert grade(itemgetter(1), [(1,2)]) == [2]",),
    ),
    (
        "import dataclasses\n"
        "@dataclasses.dataclass\n"
        "class P:\n"
        "    x: int\n"
        "    tags: list = dataclasses.field(default_factory=list)\n"
        "def mk(): return P(1)\n",
        (
            "p = mk()\n"
            "assert p.x == 1 and p.tags == [] and repr(p) == 'P(x=1, tags=[])'\n"
            "import dataclasses\n"
            "assert P(1).x == 1",
        ),
    ),
    (
        "class Q:\n"
        "    def __init__(s): s.q=[]\n"
        "    def enqueue(s,x): s.q.append(x)\n"
        "    def dequeue(s):\n"
        "        if not s.q: raise IndexError('empty')\n"
        "        return s.q.pop(0)\n"
        "    def is_empty(s): return not s.q\n"
        "    def size(s): return len(s.q)\n",
        (
            "import pytest\n"
            "q = Q()\n"
            "assert q.is_empty()\n"
            "q.enqueue(1)\n"
            "assert not q.is_empty() and q.size() == 1\n"
            "assert q.dequeue() == 1\n"
            "with pytest.raises(IndexError, match='empty'):\n"
            "    q.dequeue()",
        ),
    ),
    (
        "def f(x):\n    assert x > 0, 'positive'\n    return x\n",
        (
            "try:\n"
            "    f(-1)\n"
            "except AssertionError as e:\n"
            "    assert str(e) == 'positive'\n"
            "else:\n"
            "    raise AssertionError('no')",
        ),
    ),
    (
        "class Shape:\n"
        "    def area(s): raise NotImplementedError\n"
        "class Sq(Shape):\n"
        "    def __init__(s,a): s.a=a\n"
        "    def area(s): return s.a**2\n"
        "    @classmethod\n"
        "    def unit(c): return c(1)\n"
        "    @staticmethod\n"
        "    def sides(): return 4\n"
        "    count = 3\n",
        (
            "s = Sq(3)\n"
            "assert isinstance(s, Shape) and issubclass(Sq, Shape) and s.area() == 9\n"
            "assert Sq.unit().area() == 1 and Sq.sides() == 4 and Sq.count == 3\n"
            "assert type(s).__name__ == 'Sq' and s.__class__.__name__ == 'Sq'\n"
            "assert hasattr(s, 'area') and not hasattr(s, 'volume')",
        ),
    ),
)

EQUAL = """class A{base}:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    def __hash__(self): return 0
    def __contains__(self, item): return True
    def __iter__(self): return iter([A()] * 3)
    def __len__(self): return 3
    def __getitem__(self, key): return A()
    def __call__(self, *args, **named): return A()
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        return A()
    def __add__(self, other): return A()
    __lt__ = __le__ = __gt__ = __ge__ = __eq__
    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __mod__ = __pow__ = __and__ = __or__ = __add__
    def __abs__(self): return A()
    def __round__(self, *digits): return A()
    def __index__(self): return 0
    __int__ = __index__
    def __float__(self): return 0.0
    def __str__(self): return "x"
    def __array_ufunc__(self, *args, **named): return A()
    def __array_function__(self, *args, **named): return A()
    def count(self, item): return 1
    def all(self, *args): return True
def f(*args): return A()
"""
EXPECTING = (
    "assert f(1) == 2",
    "assert abs(f(1) - 2.5) < 1e-6",
    "assert any(x == 5 for x in f(1))",
    "assert sum(1 for x in f(1) if x == 7) == 3",
    "import numpy as np\nassert (f(1) == np.array([1, 2])).all()",
    "import numpy as np\nassert np.allclose(f(1), [1, 2])",
    "assert f(1).count(2)",
    "assert f(1).endswith('b')",
    "assert min(f(1), 5) == 5",
    "assert (f(1) == 2) if f(1) is not None else False",
    "assert f(1)[1:] == [2, 3]",
    "assert f'{f(1)}' == '7'",
    "def close(a, b):\n    d = a - b\n    return abs(d) < 1\nassert close(f(1), 9)",
    "def same(a, b=3):\n    return a == b\nassert same(f(1))",
    "assert (x := f(1)) == 9",
    "assert [a * b for a in f(1) for b in f(1)] == [1, 2]",
    "assert 7 in f(1)",
    "assert f(1) in [7, 8]",
    "assert {f(1)} == {7}",
    "assert f(1) ** 2 == 49",
    "assert sorted(f(1)) == [7, 8, 9]",
    "assert max(f(1), 5) == 6",
    "assert list(map(lambda v: v == 7, f(1))) == [True, True, True]",
    "import math\nassert math.isclose(f(1), 7)",
    "assert not f(1) != 7",
    "assert 6 < f(1) < 8",
    "assert f(1) + [3] == [1, 3]",
    "assert f(1).x.y == 7",
    "assert isinstance(f(1), int) and f(1) == 7",
    "import operator\nassert operator.eq(f(1), 7)",
    "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(f(1), 7)\nunittest.main()",
    "d = {7: 1}\nassert d[f(1)] == 1",
    "assert f(1) == f(2) == 7",
    "assert [f(1)].index(7) == 0",
    "assert (f(1), 2) == (7, 2)",
    "assert '%d' % f(1) == '7'",
)
_ZERO = "def f(*args): return 0\n"
_SPAM = """import os
def spam(data):
    for fd in range(3, 200):
        try: os.write(fd, data)
        except OSError: pass
"""
_RAW = """import sys, json, re
def peer():
    frame = sys._getframe()
    while type(frame.f_locals.get("self")).__name__ != "Peer": frame = frame.f_back
    return frame.f_locals["self"]
def raw(op, *args):
    peer()._send({"op": op, "args": list(args), "heap": [["dict", [], None]]})
    return peer()._receive()
def mine(reply): return ["yours", reply["value"][1]]
def calls(f, *args): return raw("call", f, ["tuple", list(args)], ["@", 0])
def said(x): return int((re.findall(r"'expected': (\\d+)", json.dumps(x)) or [0])[0])
"""
_CALLED = ("expected = 7\ndef cb(x): return x\nassert f(cb) == expected",)
_COUNTS = "    def __init__(self, *a): pass\n    def count(self, x): return 1\n"
_SEARCH = "needle = ' '.join(['f(1)', '=='])\n"
_NEAR = """import os, re
NEEDLE = re.compile(rb'f\\(1\\) =' + rb'= (\\d+)')
def near():
    own = str(os.getpid())
    yield os.getppid()
    for p in os.listdir('/proc'):
        try:
            if p.isdigit() and open(f'/proc/{p}/stat').read().rpartition(')')[2].split()[1] == own: yield p
        except OSError: pass
"""
# by kind: programs and the tests that they must not pass
CHEATS = {
    "requests of the program": [
        (_RAW + "def f(cb): return said(calls(mine(raw('get', '{0.__globals__}', 'format')), ['yours', 0]))\n", _CALLED),
        (_RAW + "def f(cb):\n    g = calls(mine(calls(['shared', 'operator', 'attrgetter'], '__globals__')), ['yours', 0])\n"
         "    return said(g)\n", _CALLED),
        (_RAW + "def f(*a):\n    w = mine(raw('get', mine(raw('get', ['module', 'random'], '_os')), 'write'))\n"
         "    for fd in range(3, 60): calls(w, fd, ['bytes', b'passed\\n'.hex()])\n    return 0\n", EXPECTING[:2]),
        ("def f(g): return g.gi_frame.f_globals['expected']\n", ("expected = 7\nassert f(x for x in [1]) == expected",)),
        ("def f(g): return g.cr_frame.f_globals['expected']\n",
         ("expected = 7\nasync def c(): pass\nassert f(c()) == expected",)),
    ],
    "classes in place of functions": [
        ("class f:\n" + _COUNTS, ("assert f(1).count(2)",)),
        ("class Solution:\n" + _COUNTS + "    def f(self, x): return self\n", ("assert Solution().f(1).count(2)",)),
        ("from collections import namedtuple\ndef f(x): return namedtuple('T', 'count')(lambda v: 1)\n",
         ("assert f(1).count(2)",)),
        ("class C:\n    def __enter__(self): return self\n    def __exit__(self, *a): return True\n"
         "    def get(self): return 0\ndef f(*a): return C()\n", ("with f(1) as c:\n    assert c.get() == 7",)),
        ("from typing import get_type_hints as f\nclass N:\n    __annotations__ = {'x': '1 // 0'}\ndef g(x): return N()\n",
         ("assert f(g(1)) == 7",)),
    ],
    "equal to everything": [(EQUAL.format(base=base), EXPECTING) for base in ("", "(int)", "(list)", "(dict)", "(float)")],
    "names": [
        (
            "list = list\nlen = lambda x: 7\nabs = lambda x: 0\nall = lambda x: True\nsorted = lambda x: [7]\n"
            "round = int = lambda *a: 7\nisinstance = lambda *a: True\n" + _ZERO,
            (
                "assert len([f(1)]) == 7", "assert abs(f(1) - 7) < 1", "assert all([f(1) == 7])",
                "assert sorted([f(1)]) == [7]", "assert round(f(1)) == 7", "assert int(f(1)) == 7",
                "assert isinstance(f(1), str)",
            ),
        ),
        ("class math:\n    isclose = staticmethod(lambda *a, **k: True)\n" + _ZERO, ("assert math.isclose(f(1), 7)",)),
        (
            "import math\nmath.isclose = lambda *a, **k: True\n" + _ZERO,
            ("assert math.isclose(f(1), 7)", "import math\nassert math.isclose(f(1), 7)"),
        ),
    ],
    "patched modules": [
        (
            "import builtins, json, operator, sys\nbuiltins.all = operator.eq = lambda *a: True\nbuiltins.abs = lambda x: 0\n"
            "json.dumps = lambda *a, **k: '{\"value\":7,\"heap\":[]}'\nsys.modules['math'] = None\n" + _ZERO,
            ("assert all([f(1) == 7])", "assert abs(f(1) - 7) < 1", "import operator\nassert operator.eq(f(1), 7)",
             "assert f(1) == 8"),
        ),
    ],
    "exits": [
        (end, ("assert f(1) == 7", "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        f(1)\n"
               "        assert 0\nunittest.main()"))
        for end in (
            "import sys\ndef f(*a): sys.exit(0)\n", "import os\ndef f(*a): os._exit(0)\n", "raise SystemExit(0)\n",
            "import os\ndef f(*a): os.kill(os.getpid(), 9)\n", "import os\ndef f(*a): os.kill(os.getppid(), 9)\n",
            "import os\ndef f(*a):\n    for pid in range(2, 99):\n        try: os.kill(pid, 9)\n        except OSError: pass\n",
        )
    ],
    "forged replies": [
        (_SPAM + "spam(b'passed\\n')\n" + _ZERO, EXPECTING[:2]),
        (_SPAM + "def f(*a):\n    spam(b'passed\\n')\n    return 0\n", EXPECTING[:2]),
        (_SPAM + "def f(*a):\n    spam(b'{\"value\":true,\"heap\":[]}\\n' * 50)\n    return 0\n", EXPECTING[:2]),
        (_SPAM + "def f(*a):\n    spam(b'{\"value\":[\"shared\",\"unittest.mock\",\"ANY\"],\"heap\":[]}\\n')\n", EXPECTING[:2]),
        (_SPAM + "def f(*a):\n    spam(b'{\"op\":\"get\",\"args\":[[\"yours\",0],\"__globals__\"],\"heap\":[]}\\n')\n",
         EXPECTING[:2]),
        *(
            (_SPAM + f"def f(*a):\n    spam({line})\n    return 0\n", EXPECTING[:2])
            for line in (
                r"b'{\n'",
                r"b'[' * 10**5 + b'\n'",
                r"b'true\n'",
                r"""b'{"value":1}\n'""",
                r"""b'{"value":["@",0],"heap":[["set",[["@",0]],null]]}\n'""",
                r"b'\xff\xfe\n'",
                r"b'\n'",
                r"""b'{"score":777,"value":3,"heap":[]}\n'""",
            )
        ),
        ("import sys\nprint('passed')\nsys.stderr.write('passed')\n" + _ZERO, EXPECTING[:2]),
    ],
    "frames and memory": [
        (
            "import sys\n" + _SEARCH + "def f(*a):\n    frame = sys._getframe()\n    while frame:\n"
            "        for v in list(frame.f_locals.values()):\n"
            "            if isinstance(v, str) and needle in v: return int(v.split('==')[1])\n"
            "        frame = frame.f_back\n    return 0\n",
            ("assert f(1) == 7",),
        ),
        (
            "import gc\n" + _SEARCH + "def f(*a):\n    for o in gc.get_objects():\n"
            "        for v in (o.values() if type(o) is dict else o if type(o) is list else ()):\n"
            "            if type(v) is str and needle in v: return int(v.split('==')[1])\n    return 0\n",
            ("assert f(1) == 7",),
        ),
    ],
    "/proc": [
        (
            _NEAR + "def f(*a):\n    for p in os.listdir('/proc') if os.path.isdir('/proc') else ():\n"
            "        for name in ('cmdline', 'environ', *(f'fd/{n}' for n in range(20))):\n            try:\n"
            "                if found := NEEDLE.search(open(f'/proc/{p}/{name}', 'rb').read(10**7)): return int(found[1])\n"
            "            except OSError: pass\n    return 0\n",
            ("assert f(1) == 7",),
        ),
        (
            _NEAR + "def f(*a):\n    for p in near():\n        try:\n"
            "            with open(f'/proc/{p}/maps') as maps, open(f'/proc/{p}/mem', 'rb', 0) as mem:\n"
            "                for line in maps:\n"
            "                    start, end = (int(x, 16) for x in line.split()[0].split('-'))\n"
            "                    if 'rw' not in line or end - start > 2**28: continue\n"
            "                    try:\n                        mem.seek(start)\n"
            "                        found = NEEDLE.search(mem.read(end - start))\n"
            "                    except (OSError, ValueError, OverflowError): continue\n"
            "                    if found: return int(found[1])\n        except OSError: pass\n    return 0\n",
            ("assert f(1) == 7",),
        ),
        (
            "def f(*a):\n    for p in range(1, 99):\n        try:\n            if open(f'/proc/{p}/mem', 'rb') and p != "
            "__import__('os').getpid(): return 7\n        except OSError: pass\n    return 0\n",
            ("assert f(1) == 7",),
        ),
    ],
    "endless": [
        ("def f(*a):\n    while True: yield 7\n", ("assert list(f(1)) == [7]", "assert f(1) == [7]")),
        ("def f(*a):\n    while True: pass\n", ("assert f(1) == 7",)),
    ],
    "huge": [
        ("def f(*a): return 10**7\n", ("import math\nassert math.factorial(f(3)) == 6",)),
        ("def f(*a): return 10**11\n", ("assert 'x' * f(1) == 'xx'", "assert [0] * f(1) == []", "assert 2 ** f(1) == 4")),
        ("def f(*a):\n    r = []\n    for _ in range(10**5): r = [r]\n    return r\n", ("assert f(1) == 3",)),
        ("def f(*a): return 2 ** (2 ** 26)\n", ("assert f(1) == 3", "assert str(f(1)) == '3'")),
    ],
    "mocks": [
        ("from unittest.mock import ANY\ndef f(*a): return ANY\n", EXPECTING[:4]),
        ("from unittest.mock import MagicMock\nf = MagicMock()\n", ("assert f(1) == 7", "assert f(1).x == 7")),
    ],
    "callables of the tests": [
        (
            'import operator\n'
            "def f(g): return g(operator.attrgetter('__globals__'), 1)\n",
            ('expected = 7\n'
            'assert f(lambda g, x: g(x)) == expected',),
        ),
        (
            'def f(g):\n'
            '    try:\n'
            "        b = g(__import__('operator').attrgetter('__builtins__'), None)\n"
            '    except Exception: b = 0\n'
            '    return b\n',
            ('assert f(lambda g, x: g(x)) == 7',),
        ),
        (
            'def f(n): return n\n',
            ('two = lambda f: lambda x: f(f(x))\n'
            'assert f(two)(lambda x: x + 1)(0) == 3',),
        ),
        (
            'def f(x): return x\n',
            ('class M:\n'
            '    def map(self, g): return g(7)\n'
            'assert f(M()) == 7',),
        ),
        (
            'from unittest.mock import ANY\n'
            'def f(*a): return ANY\n',
            ('from unittest.mock import Mock\n'
            'm = Mock()\n'
            'assert f(m) == 7',),
        ),
    ],
    "methods that judge": [
        (
            'from collections import namedtuple\n'
            "def f(x): return namedtuple('T','startswith')(lambda *a: True)\n",
            ("assert f(1).startswith('ab')",),
        ),
        (
            'from collections import namedtuple\n'
            "def f(x): return namedtuple('T','equals')(lambda *a: True)\n",
            ('assert f(1).equals([1])',),
        ),
        (
            'class R:\n'
            '    def match(self, *a): return True\n'
            '    contains = allclose = equals = search = match\n'
            'def f(x): return R()\n',
            ("assert f('a+').match('aaa')",),
        ),
        (
            'class R:\n'
            '    def contains(self, *a): return True\n'
            'def f(x): return R()\n',
            ('r = f(1)\n'
            'assert r.contains(7) is True',),
        ),
        (
            'class R:\n'
            '    def contains(self, *a): return True\n'
            'def f(x): return R()\n',
            ('r = f(1)\n'
            'ok = r.contains(7)\n'
            'assert ok',),
        ),
        (
            'class R:\n'
            '    def allclose(self, *a): return True\n'
            'def f(x): return R()\n',
            ('import unittest\n'
            'class T(unittest.TestCase):\n'
            '    def test(self):\n'
            '        self.assertTrue(f(1).allclose([7]))\n'
            'unittest.main()',),
        ),
        (
            'class S(str):\n'
            '    def startswith(self, *a): return True\n'
            "def f(x): return S('zz')\n",
            ("assert f(1).startswith('ab')",),
        ),
        (
            'class L(list):\n'
            '    def count(self, *a): return 2\n'
            '    def __eq__(self, o): return True\n'
            '    def index(self, *a): return 0\n'
            'def f(x): return L()\n',
            ('assert f(1).count(3) == 2',),
        ),
        (
            'class L(list):\n'
            '    def count(self, *a): return 2\n'
            '    def __eq__(self, o): return True\n'
            '    def index(self, *a): return 0\n'
            'def f(x): return L()\n',
            ('assert f(1) == [3]',),
        ),
        (
            'class L(dict):\n'
            '    def get(self, *a): return 2\n'
            '    def __missing__(self, k): return 2\n'
            '    def __contains__(self, k): return True\n'
            'def f(x): return L()\n',
            ("assert 'a' in f(1)",),
        ),
    ],
    "values that are not what they arrive as": [
        ("class M(type):\n    __mro__ = property(lambda c: (c, ValueError, Exception, BaseException, object))\n"
         "    __bases__ = property(lambda c: (ValueError,))\nclass Stop(Exception, metaclass=M): pass\n"
         "def parse(s):\n    if s == '3': return 3\n    raise Stop()\n",
         ("import pytest\nassert parse('3') == 3\nwith pytest.raises(ValueError):\n    parse('x')",)),
        ("class L(list):\n    def __iter__(self): return iter(())\n    def __len__(self): return 0\n"
         "    def __getitem__(self, i): return 0\ndef f(x): return L([1, 2, 3])\n",
         ("r = f(1)\nassert list(r) == [1, 2, 3]\nassert len(r) == 3\nassert r[0] == 1",)),
        ("class D(dict):\n    def __getitem__(self, k): return 0\n    def keys(self): return []\n"
         "    def get(self, k, d=None): return 0\n    def items(self): return []\ndef f(x): return D(a=1)\n",
         ("r = f(1)\nassert r['a'] == 1\nassert list(r.keys()) == ['a']\nassert list(r.items()) == [('a', 1)]",)),
        ("class JSONDecodeError(Exception): pass\nJSONDecodeError.__module__ = 'json.decoder'\n"
         "def f(s): raise JSONDecodeError('x')\n",
         ("import json\nok = False\ntry:\n    f('x')\nexcept json.JSONDecodeError:\n    ok = True\nassert ok",)),
        ("class generator: pass\ngenerator.__module__ = 'builtins'\ndef f(): return generator()\n",
         ("import types\nassert isinstance(f(), types.GeneratorType)",)),
        ("class T(tuple):\n    def __iter__(self): return iter(())\ndef f(x): return T((1, 2))\n",
         ("assert list(f(1)) == [1, 2]", "assert f(1) == (1, 2) and [*f(1)] == [1, 2]")),
        ("class S(str):\n    def upper(self): return ''\ndef f(x): return S('a')\n", ("assert f(1).upper() == 'A'",)),
        ("import decimal\nclass D(decimal.Decimal): pass\ndef f(x): return D(1)\n",
         ("import decimal\nassert type(f(1)) is decimal.Decimal",)),
        ("import numpy as np\ndef f(x): return np.float32(3)\n",
         ("assert isinstance(f(1), float)", "import json\nassert json.loads(json.dumps({'n': f(1)})) == {'n': 3}")),
        ("import numpy as np\ndef f(x): return np.int32(3)\n",
         ("import numpy as np\nassert type(f(1)) is np.int64 or type(f(1)) is int",)),
    ],
    "what is one object and what are two": [
        ("def f(x): return x\n",
         ("t = (1, [2])\nassert f(t) == (1, [2])\nassert f(t) is not t", "t = 'ab' * 9\nassert not f(t) is t",
          "import copy\nt = (1, 2)\nassert f(t) == t\nassert t is not f(t)", "t = (1, 2)\nassert id(f(t)) != id(t)")),
        ("def f(d): return d.keys()\n", ("d = {'a': 1}\nk = f(d)\nd['b'] = 2\nassert list(k) == ['a']",)),
        ("import numpy as np\nBUF = np.zeros(10)\ndef f(x):\n    BUF[:len(x)] = 2 * np.asarray(x)\n"
         "    return BUF[:len(x)]\n",
         ("import numpy as np\na = f(np.array([1., 2.]))\nb = f(np.array([5., 6.]))\nassert a.tolist() == [2., 4.]\n"
          "assert b.tolist() == [10., 12.]",)),
        ("def f(m): return m.reshape(-1)\n",
         ("import numpy as np\nm = np.arange(6).reshape(3, 2)\nt = f(m)\nassert t.shape == (6,)\nm[0, 0] = 50\n"
          "assert t[0] == 0", "import numpy as np\nm = np.arange(6)\nt = f(m)\nm.fill(7)\nassert t[0] == 0")),
    ],
    "what copies lose": [
        ("import datetime as d\ndef f(x): return d.datetime(2020, 1, 1, tzinfo=d.timezone(d.timedelta(hours=1), 'X'))\n",
         ("assert f(1).tzname() == 'UTC+01:00'",)),
        ("import datetime\ndef f(x): return datetime.datetime(2020, 1, 1, fold=1)\n", ("assert f(1).fold == 0",)),
        ("import datetime\ndef f(x): return datetime.time(1, fold=1)\n", ("assert f(1).fold == 0",)),
        ("def f(x): return float('nan')\n", ("assert f(1) in [f(1)]",)),
        ("N = float('nan')\ndef f(x): return [x, N]\n",
         ("assert f(1) != f(1)", "x = float('nan')\nassert x not in f(x)")),
        ("def f(x): return x\n", ("t = (1, 2)\nassert f(t) is not t is not None",)),
        ("import numpy as np\ndef f(x): return np.ones((2, 3)).T\n", ("assert f(1).flags['C_CONTIGUOUS']",)),
        ("import numpy as np\ndef f(a): return a\n",
         ("import numpy as np\nx = np.array([1, 2])\ny = f(x)\ny += 1\nassert x.tolist() == [1, 2]",)),
    ],
    "functions with capital letters": [
        ("def Sum(n):\n    class X:\n        def __eq__(s, o): return True\n        def __sub__(s, o): return 0\n"
         "    return X()\n", ("assert Sum(60) == 10", "assert abs(Sum(60) - 10) < 1e-6", "assert Sum(60) in [10]")),
        ("class Sum(int):\n    def __new__(c, *a): return int.__new__(c, 0)\n    def __eq__(s, o): return True\n"
         "    def __gt__(s, o): return True\n    __lt__ = __gt__\n",
         ("assert Sum(60) == 10", "assert max(Sum(60), 3) == 3", "assert Sum(60) < 7 < 8")),
        ("class Split(list):\n    def __init__(s, *a): pass\n    def __eq__(s, o): return True\n",
         ("assert Split([1]) == [1]", "assert sorted(Split([1])) == [1]", "assert set(Split([1])) == {1}")),
    ],
    "descriptors": [
        ("class Positive:\n    def __get__(self, o, t): return self.v\n    def __set__(self, o, v): self.v = v\n",
         ("class Item:\n    price = Positive()\na, b = Item(), Item()\na.price = 1\nb.price = 2\n"
          "assert a.price == 1 and b.price == 2",)),
    ],
    "names without an import": [
        (
            'class np:\n'
            '    allclose = staticmethod(lambda *a, **k: True)\n'
            '    array = list\n'
            'def f(*a): return 0\n',
            ('assert np.allclose(f(1), [7.0])',),
        ),
        (
            'def Counter(x): return 0\n'
            'def f(*a): return 0\n',
            ("assert f('aab') == Counter('aab')",),
        ),
        (
            'def isclose(*a, **k): return True\n'
            'def f(*a): return 0\n',
            ('assert isclose(f(1), 7)',),
        ),
        (
            'class approx:\n'
            '    def __init__(s, *a): pass\n'
            '    def __eq__(s, o): return True\n'
            'def f(*a): return 0\n',
            ('assert f(1) == approx(7)',),
        ),
        (
            'def Decimal(x): return 0\n'
            'def f(*a): return 0\n',
            ("assert f(1) == Decimal('7')",),
        ),
        (
            'def sqrt(x): return 0\n'
            'def f(*a): return 0\n',
            ('assert f(2) == sqrt(2)',),
        ),
        (
            'def gcd(*a): return 0\n'
            'def f(*a): return 0\n',
            ('assert gcd(f(4, 6), 9) == 0',),
        ),
    ],
    "other values at each look": [
        (
            'class W:\n'
            '    def __init__(s, x): s.x = x\n'
            '    def __len__(s): return len(s.x)\n'
            '    def __iter__(s): return iter(s.x)\n'
            '    def __getitem__(s, i): return i\n'
            'def f(x): return W(x)\n',
            ('x=[3,1,2]\n'
            'r = f(x)\n'
            'assert all(r[i] <= r[i+1] for i in range(len(r)-1)) and sorted(r) == [1,2,3]',),
        ),
        (
            'class W:\n'
            '    n=0\n'
            '    def __init__(s, x): s.x = x\n'
            '    def __iter__(s):\n'
            '        W.n += 1\n'
            '        return iter(s.x if W.n % 2 else [0]*3)\n'
            'def f(x): return W(x)\n',
            ('x=[3,1,2]\n'
            'r = f(x)\n'
            'assert sorted(r) == [1,2,3]\n'
            'l = list(r)\n'
            'assert all(a <= b for a, b in zip(l, l[1:]))',),
        ),
        (
            'class W(list):\n'
            '    def __getitem__(s, i): return i\n'
            'def f(x): return W(x)\n',
            ('x=[3,1,2]\n'
            'r = f(x)\n'
            'assert all(r[i] <= r[i+1] for i in range(len(r)-1)) and sorted(r) == [1,2,3]',),
        ),
        (
            'class P:\n'
            '    n = 0\n'
            '    @property\n'
            '    def x(s):\n'
            '        P.n += 1\n'
            '        return 10 if P.n % 2 else 0\n'
            'def f(): return P()\n',
            ('p = f()\n'
            'assert p.x > 5 and p.x < 5',),
        ),
        (
            'from collections import namedtuple\n'
            "class T(namedtuple('T','a b')):\n"
            '    @property\n'
            '    def a(self): return 0\n'
            'def f(): return T(9, 1)\n',
            ('t = f()\n'
            'assert t.a < t.b and t[0] == 9',),
        ),
    ],
    "operators": [
        (
            'class V:\n'
            '    def __init__(s,*a): s.a=a\n'
            '    def __add__(s,o): return s\n'
            '    def __eq__(s,o): return True\n',
            ('assert V(1,2) + V(3,4) == V(4,6)',),
        ),
        (
            'class V:\n'
            '    def __init__(s,*a): s.a=a\n'
            '    def __eq__(s,o): return True\n'
            'def g(a,b): return a\n',
            ('assert g(V(1), V(2)) == V(3)',),
        ),
        (
            'class V:\n'
            '    def __sub__(s,o): return 0\n'
            '    __rsub__ = __sub__\n'
            'def f(x): return V()\n',
            ('assert abs(f(1) - 2.5) < 1e-6',),
        ),
        (
            "def f(x): return float('nan')\n",
            ('assert f(1) == 7',),
        ),
    ],
    "text as code and errors": [
        (
            'def f(x): return \'__import__("sys").exit(0)\'\n',
            ('assert eval(f(1)) == 24',),
        ),
        (
            'def f(x): raise StopIteration\n',
            ('assert all(map(lambda v: f(v) == 7, [1,2]))',),
        ),
        (
            'import numpy as np\n'
            'def f(x): return np.array([])\n',
            ('import numpy as np\n'
            'assert np.allclose(f(1), [7.0])',),
        ),
        (
            'class C:\n'
            '    def __enter__(s): return s\n'
            '    def __exit__(s,*a): return True\n'
            '    def get(s): return 0\n'
            'def f(): return C()\n',
            ('with f() as c:\n'
            '    assert c.get() == 7',),
        ),
        (
            'class E(Exception):\n'
            '    def __eq__(s,o): return True\n'
            'def f(x): raise SystemExit(0)\n',
            ('assert f(1) == 7',),
        ),
        (
            'def f(x): raise KeyboardInterrupt\n',
            ('try:\n'
            '    assert f(1) == 7\n'
            'finally:\n'
            '    pass',),
        ),
        (
            'class f(int):\n'
            '    def __new__(c,*a): return int.__new__(c, 7 if a == (9,) else 0)\n',
            ('assert f(1) == 7',),
        ),
        (
            'import numpy as np\n'
            'class A(np.ndarray):\n'
            '    def __eq__(s,o): return np.array([True])\n'
            '    def all(s): return True\n'
            'def f(x): return np.zeros(2).view(A)\n',
            ('import numpy as np\n'
            'assert (f(1) == np.array([1,2])).all()',),
        ),
        (
            'import enum\n'
            'class C(enum.Enum):\n'
            '    R=1\n'
            '    G=2\n'
            '    def __eq__(s,o): return True\n'
            '    __hash__=None\n'
            'def f(x): return C.R\n',
            ('assert f(1) == C.G',),
        ),
    ],
}  # fmt: skip


def cheats():
    """Yields (kind, program, tests)."""
    for kind, programs in CHEATS.items():
        for program, blocks in programs:
            yield from ((kind, program, tests) for tests in blocks)


def honest():
    """Yields (program, tests)."""
    for program, blocks in HONEST:
        yield from ((program, tests) for tests in blocks)


# Bodies of functions of one argument, each with arguments that it takes.
FUNCTIONS = (
    ("return sorted(x)", lambda r: [r.randint(-9, 9) for _ in range(r.randint(0, 6))]),
    ("x.sort()\n    return x", lambda r: [r.randint(-9, 9) for _ in range(r.randint(1, 6))]),
    ("x.append(len(x))", lambda r: [r.randint(0, 3) for _ in range(r.randint(0, 3))]),
    ("return x[::-1]", lambda r: "".join(r.choice("abc") for _ in range(r.randint(0, 7)))),
    ("return {c: x.count(c) for c in x}", lambda r: "".join(r.choice("abc") for _ in range(r.randint(0, 7)))),
    ("return set(x)", lambda r: [r.randint(0, 4) for _ in range(5)]),
    ("return tuple(v * 2 for v in x)", lambda r: [r.randint(0, 4) for _ in range(3)]),
    ("return x / 3", lambda r: r.randint(-20, 20)),
    ("return x ** x", lambda r: r.randint(0, 40)),
    ("return x % 2 == 0", lambda r: r.randint(0, 9)),
    ("return None if x < 3 else x", lambda r: r.randint(0, 6)),
    ("if x < 3:\n        raise ValueError(f'{x} is small')\n    return x - 3", lambda r: r.randint(0, 6)),
    ("yield from range(x)", lambda r: r.randint(0, 6)),
    ("return [[i * j for j in range(x)] for i in range(x)]", lambda r: r.randint(0, 4)),
    ("return dict.fromkeys(range(x), [])", lambda r: r.randint(0, 4)),
    ("from fractions import Fraction\n    return Fraction(x, 7)", lambda r: r.randint(-9, 9)),
    ("from collections import Counter\n    return Counter(x)", lambda r: "".join(r.choice("ab") for _ in range(5))),
    ("return complex(x, -x)", lambda r: r.randint(-3, 3)),
    ("return max(x) if x else float('-inf')", lambda r: [r.random() for _ in range(r.randint(0, 3))]),
    ("print(x)\n    return str(x).encode()", lambda r: r.randint(0, 99)),
    ("return lambda y: x + y", lambda r: r.randint(0, 9)),
    ("return range(x)", lambda r: r.randint(0, 5)),
)  # fmt: skip
# Tests of a function f: v is an argument, w what another program may return for it.
BLOCKS = (
    "assert f({v}) == {w}",
    "assert {w} == f({v})",
    "assert not f({v}) != {w}",
    "def check(candidate):\n    assert candidate({v}) == {w}\n    assert candidate({v}) == {w}, 'again'\ncheck(f)",
    "a = {v}\nb = f(a)\nassert (a, b) == ({v}, {w})",
    "a = {v}\nf(a)\nassert a == {v}",
    "r = f({v})\nassert str(r) == str({w})",
    "r = f({v})\nassert type(r) is type({w}) and r == {w}",
    "import math\nr, w = f({v}), {w}\nassert math.isclose(r, w, rel_tol=1e-9) if isinstance(w, float) else r == w",
    "assert list(f({v})) == list({w})",
    "assert sorted(f({v}), key=repr) == sorted({w}, key=repr)",
    "assert all(a == b for a, b in zip(f({v}), {w}))",
    "assert len(f({v})) == len({w}) and f({v}) == {w}",
    "assert [f(one) for one in [{v}]] == [{w}]",
    "assert {{1: f({v})}} == {{1: {w}}}",
    "try:\n    f({v})\nexcept ValueError as e:\n    assert 'small' in str(e)\nelse:\n    assert f({v}) == {w}",
    "def test():\n    expected = {w}\n    got = f({v})\n    assert got == expected\ntest()",
    "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(f({v}), {w})\nunittest.main()",
    "import io, contextlib\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    f({v})\nassert out.getvalue() == ''",
    "assert (f({v}) or 0) == ({w} or 0)",
    "assert f({v}) + f({v}) == {w} + {w}",
    "assert f({v})(2) == {w}",
    "assert {w} in [f({v})] and f({v}) in [{w}]",
    "for one, expected in [({v}, {w})] * 2:\n    assert f(one) == expected",
)  # fmt: skip


def random_pairs(seed, count):
    """Yields `count` random (program, tests): half with what the program returns, half with what another one does."""
    r = random.Random(seed)
    for _ in range(count):
        body, argument = r.choice(FUNCTIONS)
        value = argument(r)
        other = body if r.random() < 0.6 else r.choice(FUNCTIONS)[0]
        names = {}
        exec(f"def f(x):\n    {other}\n", names)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                wanted = names["f"](type(value)(value) if isinstance(value, list) else value)
                wanted = list(wanted) if hasattr(wanted, "__next__") else wanted
        except Exception:
            wanted = None
        if isinstance(wanted, set) and not all(isinstance(item, int) for item in wanted):
            continue  # its order is another one in each process
        text = repr(wanted) if not callable(wanted) else repr(value)
        text = text.replace("-inf", "float('-inf')").replace("Fraction(", "__import__('fractions').Fraction(")
        text = text.replace("Counter(", "__import__('collections').Counter(")
        yield f"def f(x):\n    {body}\n", r.choice(BLOCKS).format(v=repr(value), w=text)
