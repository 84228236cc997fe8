"""Public VQA, GUI and region sets -> canonical rows: hand-made records in the shape of each release."""

from PIL import Image

from tests.data.sets import save
from tests.data.test_formats import one
from tests.tables import each, refused
from vlrl.checks.fields import field_problems
from vlrl.data import FIELDS, read_rows, sample_from_row
from vlrl.data.sources.fields import RecordSource
from vlrl.data.sources.reading import canonical_rows
from vlrl.errors import DataError

YES = {"answer": "yes", "answer_type": "yes_no"}
NO = {**YES, "answer": "no"}

CASES = {
    "VSR": ({"image": "0001.jpg", "image_link": "http://images.cocodataset.org/train2017/0001.jpg",
             "caption": "The teddy bear is in front of the person.", "label": 1, "relation": "in front of",
             "annotator_id": 31, "vote_true_validator_id": "[2, 6]", "vote_false_validator_id": "[]"},
            {"image": "0001.jpg", **YES,
             "question": 'Is this statement about the image true? "The teddy bear is in front of the person."'}),
    "NLVR2": ({"question_id": "dev-850-0-0", "question": "There are two dogs.", "answer": "False",
               "left_image": "l.png", "right_image": "r.png"},
              {"id": "dev-850-0-0", "images": ["l.png", "r.png"], **NO,
               "question": 'Is this statement about the two images true? "There are two dogs."'}),
    "HallusionBench": ({"category": "VD", "subcategory": "chart", "visual_input": "1", "set_id": "0", "figure_id": "1",
                        "question_id": "0", "question": "Is China first?", "gt_answer_details": "Russia.",
                        "gt_answer": "0", "filename": "./VD/chart/0_1.png"},
                       {"id": "VD-chart-0-1-0", "image": "VD/chart/0_1.png", "question": "Is China first?",
                        "category": "VD", **NO}),
    "HallusionBench without an image": ({"category": "VS", "visual_input": "0", "set_id": "0", "question_id": "1",
                                         "question": "Is it?", "gt_answer_details": "Yes.", "gt_answer": "1",
                                         "filename": None},
                                        {"id": "VS-0-1", "question": "Is it?", "category": "VS", **YES}),
    "VQAv2": ({"question_type": "is this", "multiple_choice_answer": "yes", "answer_type": "yes/no", "question_id": 5,
               "answers": [{"answer": a, "answer_confidence": "yes", "answer_id": n} for n, a in enumerate(
                   ["no", "yes", "yes"])], "image_id": 1, "question": "Is this a cat?", "image": "a.png"},
              {"id": 5, "image": "a.png", "question": "Is this a cat?", **YES}),
    "We-Math": ({"ID": "1", "question": "What is the area?", "option": "A. 2; B. 3; C. 4; D. No correct answer",
                 "answer": "B", "image_path": "a.png", "key": "one_step"},
                {"id": "1", "image": "a.png", "question": "What is the area?", "answer": "B", "answer_type": "choice",
                 "options": ["2", "3", "4", "No correct answer"]}),
    "SLAKE": ({"img_id": 1, "img_name": "x1/source.jpg", "question": "Which organ?", "answer": "Lung", "q_lang": "en",
               "answer_type": "OPEN", "qid": 7},
              {"id": 7, "image": "x1/source.jpg", "question": "Which organ?", "answer": "Lung", "answer_type": "text"}),
    "OlympiadBench": ({"id": 1, "question": "Find x.<image_1>", "solution": ["x is 2"], "final_answer": ["2"],
                       "image_1": "a.png", "image_2": None, "difficulty": "Competition", "answer_type": "Numerical",
                       "question_type": "Open-ended"},
                      {"id": 1, "image": "a.png", "question": "Find x.<image>", "answer": "2",
                       "answer_type": "number"}),
    "STAR": ({"question_id": "I_1", "question": "Which object?", "video_id": "6H78U", "start": 11.1, "end": 19.6,
              "answer": "The clothes.", "choices": [{"choice_id": 0, "choice": "The closet."},
                                                    {"choice_id": 1, "choice": "The clothes."}]},
             {"id": "I_1", "video": "6H78U.mp4", "video_start": 11.1, "video_end": 19.6, "question": "Which object?",
              "options": ["The closet.", "The clothes."], "answer": "B", "answer_type": "choice"}),
    "TVQA": ({"qid": 13, "q": "What?", "a0": "u", "a1": "v", "a2": "w", "a3": "x", "a4": "y", "answer_idx": 1,
              "ts": "76.01-84.2", "vid_name": "s02e03"},
             {"id": 13, "video": "s02e03.mp4", "question": "What?", "options": ["u", "v", "w", "x", "y"], "answer": "B",
              "answer_type": "choice"}),
    "EgoSchema": ({"question_idx": "1", "question": "What?", "video_idx": "001934bb", "option": ["A. u", "B. v"],
                   "answer": "1"},
                  {"video": "001934bb.mp4", "question": "What?", "options": ["u", "v"], "answer": "B",
                   "answer_type": "choice"}),
    "MuirBench": ({"idx": "1", "question": "How many in <image> and <image>?", "options": ["1", "2", "3"],
                   "answer": "B", "image_list": ["a.png", "b.png"]},
                  {"images": ["a.png", "b.png"], "question": "How many in <image> and <image>?", "answer": "B",
                   "options": ["1", "2", "3"], "answer_type": "choice"}),
    "IconQA": ({"question_id": "9", "question": "How many?", "choices": "5,10,8", "answer": "10",
                "query_image": "a.png"},
               {"id": "9", "image": "a.png", "question": "How many?", "options": ["5", "10", "8"], "answer": "B",
                "answer_type": "choice"}),
    "FigureQA": ({"image_index": 0, "question_string": "Is Red the minimum?", "answer": 0, "question_id": 1,
                  "color1_name": "Red"},
                 {"id": "0-1", "image": "0.png", "question": "Is Red the minimum?", **NO}),
    "PlotQA": ({"image_index": 3, "question_string": "How many bars?", "answer": 4, "question_id": 1},
               {"id": "3-1", "image": "3.png", "question": "How many bars?", "answer": 4, "answer_type": "count"}),
    "Visual Genome": ({"id": 1, "regions": [{"region_id": 1382, "width": 82, "height": 139, "image_id": 1,
                                             "phrase": "the clock is green", "y": 57, "x": 421}]},
                      {"id": "1382", "image": "1.jpg", "expression": "the clock is green",
                       "boxes": [{"box": [421, 57, 503, 196], "label": "the clock is green"}]}),
    "ShowUI": ({"id": "s", "img_url": "a.png", "img_size": [1000, 500], "element_size": 1, "element": [
        {"instruction": "Search", "bbox": [0.1, 0.2, 0.3, 0.4], "data_type": "text", "point": [0.2, 0.3]}]},
        {"id": "s-1", "image": "a.png", "width": 1000, "height": 500, "instruction": "Search",
         "box": [100, 100, 300, 200], "element_type": "text"})}


@each("record wanted", CASES.values())
def test_a_record_of_a_public_set(record, wanted):
    row = one(record)
    assert {k: v for k, v in row.items() if k in FIELDS - {"meta", "id"} or k in wanted} == wanted
    assert not list(field_problems(row)) and sample_from_row(row).id == str(wanted.get("id", "r-1"))


@each("record answer kind images", {
    # sets that the general formats read: record, answer, answer_type, number of images
    "ScienceQA": ({"image": "a.png", "question": "Which is a solid?", "choices": ["milk", "ice"], "answer": 1,
                   "hint": "", "lecture": "l", "solution": "Ice is solid."}, "B", "choice", 1),
    "AI2D": ({"question": "What eats?", "options": ["fox", "hen", "egg", "corn"], "answer": "0", "image": "a.png"},
             "A", "choice", 1),
    "ChartQA": ({"image": "a.png", "query": "How many bars?", "label": ["14"], "human_or_machine": 0}, "14",
                "count", 1),
    "DocVQA": ({"questionId": "337", "question": "which date?", "image": "a.png", "docId": 279, "answers": ["1/8/93"],
                "data_split": "val"}, "1/8/93", "text", 1),
    "OK-VQA": ({"image": "a.png", "question_id": 1, "question": "What sport?", "answer_type": "other", "answers": [
        {"answer": "moto", "answer_id": 1}, {"answer": "race", "answer_id": 2}, {"answer": "race", "answer_id": 3}]},
        ["race", "moto"], "text", 1),
    "GQA": ({"question": "Is it red?", "answer": "yes", "imageId": "2405722", "fullAnswer": "Yes, it is."}, "yes",
            "yes_no", 1),
    "MMStar": ({"index": 0, "question": "Which?\nOptions: A: red, B: blue", "image": "a.png", "answer": "A",
                "category": "c", "meta_info": {"image_path": "images/0.jpg"}}, "A", "choice", 1),
    "RealWorldQA": ({"image": "a.png", "question": "Where?\n\nA. left\nB. right", "answer": "B",
                     "image_path": "a.webp"}, "B", "choice", 1),
    "BLINK": ({"idx": "1", "question": "Which?", "image_1": "a.png", "image_2": "b.png", "image_3": None,
               "choices": ["one", "two"], "answer": "(B)", "prompt": "Look. Which?"}, "B", "choice", 2),
    "CV-Bench": ({"idx": 0, "image": "a.png", "question": "How many?", "choices": ["3", "2", "1"], "answer": "(C)",
                  "prompt": "How many? (A) 3", "filename": "img/a.png"}, "C", "choice", 1),
    "V-Star": ({"image": "a.png", "text": "Which material?\n(A) wool\n(B) silk", "category": "c", "label": "A",
                 "question_id": 0}, "A", "choice", 1),
    "DriveLM": ({"id": "s", "image": ["a.png", "b.png"], "conversations": [
        {"from": "human", "value": "<image>\nWhat is ahead?"}, {"from": "gpt", "value": "A truck."}]},
        "A truck.", "text", 2)}.values())
def test_a_set_that_the_general_formats_read(record, answer, kind, images):
    row = one(record)
    assert (row["answer"], row["answer_type"]) == (answer, kind) and len(sample_from_row(row).media) == images


def test_records_of_several_rows(tmp_path):
    box = one({"problem": "<image>the cat", "answer": "[1, 2, 30, 40]", "images": ["a.png"]})  # EasyR1
    assert box["boxes"] == [{"box": [1, 2, 30, 40], "label": "the cat"}] and box["expression"] == "the cat"
    assert one({"problem": "Find the range.", "answer": "[1, 2]", "images": ["a.png"]})["answer"] == "[1, 2]"
    natural = {"Index": 0, "Image_0": "a.png", "Image_1": "b.png", "Question_0": "Is it day?", "Question_1": "Where?",
               "Image_0_Question_0": "Yes", "Image_1_Question_0": "No", "Image_0_Question_1": "A",
               "Image_1_Question_1": "B", "Question_Type": "yes_no"}
    rows = [dict(row) for row in canonical_rows(natural)]
    assert [(r["id"], r["image"], r["question"], r["answer"], r["group_key"]) for r in rows] == [
        ("0-00", "a.png", "Is it day?", "Yes", "0"), ("0-10", "b.png", "Is it day?", "No", "0"),
        ("0-01", "a.png", "Where?", "A", "0"), ("0-11", "b.png", "Where?", "B", "0")]
    ocr = {"id": "0002005018", "imageURL": "https://x/a.jpg", "questions": ["Who wrote it?", "Is it a cookbook?"],
           "answers": ["Ann", "No"], "title": "t", "split": 1}
    rows = [dict(row) for row in canonical_rows(ocr)]
    assert [(r["id"], r["image"], r["answer"], r["answer_type"]) for r in rows] == [
        ("0002005018-1", "0002005018.jpg", "Ann", "text"), ("0002005018-2", "0002005018.jpg", "No", "yes_no")]
    (lost,) = canonical_rows({**ocr, "answers": ["Ann"]})
    assert isinstance(lost, DataError) and "2 questions and 1 answers" in str(lost)
    Image.new("RGB", (200, 100)).save(tmp_path / "a.png")
    record = {"img_filename": "a.png", "elements": [
        {"instruction": "Search", "bbox": [0.1, 0.2, 0.3, 0.4], "data_type": "text"},
        {"instruction": "Menu", "bbox": [0.5, 0.5, 1.0, 1.0]}]}
    rows = [dict(row) for row in canonical_rows(record, "auto", RecordSource("r", tmp_path))]
    assert [(r["id"], r["instruction"], r["box"]) for r in rows] == [
        ("r-1", "Search", [20, 20, 60, 40]), ("r-2", "Menu", [100, 50, 200, 100])]
    record["elements"][1]["bbox"] = [100, 50, 200, 100]
    (row,) = canonical_rows(record, "auto", RecordSource("r", tmp_path))
    assert isinstance(row, DataError) and "fractions of the image" in str(row)


@each("document wanted", {
    "CLEVR": ({"info": {}, "questions": [{"image_filename": "CLEVR_val_0.png", "question": "Any cubes?", "answer": "no",
                                          "question_index": 0, "split": "val"}]},
              {"image": "CLEVR_val_0.png", "question": "Any cubes?", **NO}),
    "FigureQA": ({"qa_pairs": [CASES["FigureQA"][0]], "total_distinct_colors": 1}, CASES["FigureQA"][1]),
    "Visual7W": ({"dataset": "visual7w-telling", "images": [{"image_id": 2, "filename": "v7w_2.jpg", "split": "train",
                  "qa_pairs": [{"qa_id": 9, "question": "Who?", "answer": "A man.", "type": "who",
                                "multiple_choices": ["A dog.", "A cat.", "No one."]}]}]},
                 {"id": 9, "image": "v7w_2.jpg", "question": "Who?", "answer": "D",
                  "options": ["No one.", "A dog.", "A cat.", "A man."], "answer_type": "choice", "split": "train"}),
    "Ego4D NLQ": ({"version": "1", "videos": [{"video_uid": "v", "clips": [{
        "clip_uid": "c", "video_start_sec": 0.0, "video_end_sec": 480.0, "annotations": [{"annotation_uid": "n",
            "language_queries": [{"clip_start_sec": 1.0, "clip_end_sec": 3.5, "query": "Where is the cup?"},
                                 {"clip_start_sec": 1.0, "clip_end_sec": 3.5, "query": None}]}]}]}]},
        {"id": "n-0", "video": "c.mp4", "question": "Where is the cup?", "answer_type": "span", "spans": [[1, 3.5]],
         "group_key": "v"})}.values())
def test_a_document_of_questions(document, wanted, tmp_path):
    (row,) = read_rows(save(tmp_path / "given.json", document))
    assert {k: row[k] for k in wanted} == wanted


test_what_cannot_be_meant_is_refused = refused(DataError, one, [
    ({**CASES["VSR"][0], "label": 2}, "label=2 must be true or false"),
    ({**CASES["HallusionBench"][0], "gt_answer": "2"}, "gt_answer='2' must be true or false"),
    ({**CASES["VQAv2"][0], "answers": ["yes", "no"]}, "1 of the row's answers are yes and as many are no"),
    ({**CASES["IconQA"][0], "choices": "choice_0.png,choice_1.png", "answer": "choice_0.png"}, "is an image, but opt"),
    ({"sample_token": "3e87", "question": "Are there any cars?", "answer": "yes"}, "a sample of nuScenes, but no"),
    ({"id": 1, "regions": [{"phrase": "x", "x": 1, "y": 2, "width": None, "height": 3}]}, "must have x, y, width and")
], plain=True)
